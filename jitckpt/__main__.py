"""`python -m jitckpt` is `jitckpt`."""

import sys

from jitckpt.cli import main

if __name__ == "__main__":
    sys.exit(main())
