"""``python -m benchmarks.gradings``."""

import sys

from benchmarks.gradings.cli import main

if __name__ == "__main__":
    sys.exit(main())
