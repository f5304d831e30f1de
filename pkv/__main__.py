"""`python -m pkv` is `pkv`."""

import sys

from pkv.cli import main

if __name__ == "__main__":
    sys.exit(main())
