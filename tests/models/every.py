"""All models of the zoo."""

from __future__ import annotations

from tests.models import zoo, zoo_others, zoo_transformers

EXAMPLES = [*zoo.EXAMPLES, *zoo_transformers.EXAMPLES, *zoo_others.EXAMPLES]
