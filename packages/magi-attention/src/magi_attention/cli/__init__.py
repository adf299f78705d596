"""Command line: ``env`` says what runs here, ``plan`` what a plan costs, ``simulate`` what many ranks would take.

Exit codes: 0; 2 when an argument is wrong, with the reason on stderr.
"""

import argparse
import sys
from collections.abc import Sequence

from .._version import __version__

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code.

    Args:
        argv: arguments without the program's name; those of the process when None.
    """
    from . import environment, plan, simulate  # here: their imports need nothing optional, but cost time

    parser = argparse.ArgumentParser(prog="python -m magi_attention", description="Distributed attention over slices.")
    parser.add_argument("--version", action="version", version=f"magi-attention {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{env,plan,simulate}")
    environment.add_parser(commands)
    plan.add_parser(commands)
    simulate.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except BrokenPipeError:  # `| head` closed the other end
        sys.stderr.close()
        return 0
