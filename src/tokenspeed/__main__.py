"""`python -m tokenspeed`: the command line."""

import sys

from tokenspeed.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
