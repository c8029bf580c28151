"""``python -m gspo``: the same as the ``gspo`` command."""

import sys

from gspo.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
