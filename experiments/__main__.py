"""`python -m experiments COMMAND`: the same as `python -m experiments.COMMAND`; without a command, the list of them."""

import sys

from experiments.cli import main

if __name__ == "__main__":
    sys.exit(main())
