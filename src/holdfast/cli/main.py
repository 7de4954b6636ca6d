"""The entry point of the command line: finds the subcommand, and says in a sentence what failed."""

from __future__ import annotations

import difflib
import io
import os
import signal
import sys
import threading
from collections.abc import Sequence
from importlib import import_module

import holdfast

__all__ = ["main"]

#: Each is a module of this package, imported when it is asked for.
SUBCOMMANDS = {
    "compare": "which method, for my model and my data? many recipes, one picture",
    "finetune": "train a model by a recipe",
    "measure": "what did a fine-tune cost? compare two checkpoints",
    "merge": "write the checkpoint between a base and a tuned model (WiSE-FT)",
    "methods": "list every method, by stage",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    traceback = "--traceback" in given or bool(os.environ.get("HOLDFAST_TRACEBACK"))
    given = [word for word in given if word != "--traceback"]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # θ and τ, on a terminal that has none
    if not given or given[0] in ("-h", "--help"):
        print(_help())
        return 0
    name, *rest = given
    if name == "--version":
        print(f"holdfast {holdfast.__version__}")
        return 0
    if name not in SUBCOMMANDS:
        near = difflib.get_close_matches(name, SUBCOMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else f": one of {', '.join(SUBCOMMANDS)}"
        print(f"holdfast: there is no subcommand {name!r}{hint}", file=sys.stderr)
        return 2
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go
    try:
        import_module(f"holdfast.cli.{name}").main(rest)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
    except KeyboardInterrupt:
        print("holdfast: stopped; what was finished is kept", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError) as error:  # what the user can do something about
        if traceback:
            raise
        print(f"holdfast: {error}", file=sys.stderr)
        return 1
    return 0


def _help() -> str:
    lines = [f"  {name:<10}{summary}" for name, summary in SUBCOMMANDS.items()]
    return "\n".join(
        [
            "usage: holdfast [--version] [--traceback] SUBCOMMAND …",
            "",
            str(holdfast.__doc__),
            "",
            "subcommands:",
            *lines,
            "",
            "holdfast SUBCOMMAND --help tells more. --traceback shows where an error comes from.",
        ]
    )
