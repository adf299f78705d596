"""``python -m magi_attention``: see ``magi_attention.cli``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
