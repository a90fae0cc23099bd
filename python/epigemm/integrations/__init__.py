"""epigemm within other libraries, which are imported when they are asked for.

Imports: `decorator`, `groups`. Taken by users.
"""
