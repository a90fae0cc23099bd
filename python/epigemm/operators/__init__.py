"""`torch.ops.epigemm.*`: implementation, fake kernels, derivatives and vmap rules; and what compiled graphs call.

Imports: `autograd`, `calls` and what these may import. Taken by `route` and the public functions.
"""
