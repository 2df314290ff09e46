"""`python -m autopar` is `autopar`."""

import sys

from autopar.cli import main

if __name__ == "__main__":
    sys.exit(main())
