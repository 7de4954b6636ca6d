"""The entry point of the command line."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

import holdfast
from holdfast.cli import measure, merge, methods

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    parser = argparse.ArgumentParser(prog="holdfast", description=holdfast.__doc__)
    parser.add_argument("--version", action="version", version=f"holdfast {holdfast.__version__}")
    subcommands = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND")
    for module in (methods, measure, merge):
        module.add_to(subcommands)
    chosen = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # θ and τ, on a terminal that has none
    if not hasattr(chosen, "run"):
        parser.print_help()
        return 0
    try:
        chosen.run(chosen)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
    except (ValueError, OSError, ImportError) as error:  # what the user can do something about
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    return 0
