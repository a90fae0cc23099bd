"""All models of the zoo."""

from __future__ import annotations

from tests.models import zoo, zoo_others

EXAMPLES = [*zoo.EXAMPLES, *zoo_others.EXAMPLES]
