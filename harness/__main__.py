"""``python -m harness``: the command line without its console script."""

import sys

from harness.cli import main

if __name__ == "__main__":
    sys.exit(main())
