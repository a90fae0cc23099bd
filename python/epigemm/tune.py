"""`python -m epigemm.tune`: measure a grid of calls and write a table of choices."""

from __future__ import annotations

import sys

import epigemm
from epigemm.tuning_cli import main

if __name__ == "__main__":
    sys.exit(main())

# The function of this name is what `epigemm.tune` must stay, whoever imports this module.
sys.modules[__name__] = epigemm.tune  # type: ignore[assignment]
