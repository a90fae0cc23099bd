"""``python -m epigemm.bench``."""

import sys

from epigemm.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
