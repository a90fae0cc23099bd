"""``python -m epigemm.bench.gradings``."""

import sys

from epigemm.bench.gradings.cli import main

if __name__ == "__main__":
    sys.exit(main())
