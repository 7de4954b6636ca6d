"""The entry point of the command line: finds the subcommand, and says in a sentence what failed."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, TextIO, cast

import holdfast

__all__ = ["main"]

#: Each is a module of this package, imported when it is asked for.
SUBCOMMANDS = {
    "compare": "which method, for my model and my data? many recipes, one picture",
    "finetune": "train a model by a recipe",
    "measure": "what did a fine-tune cost? compare two checkpoints",
    "merge": "write the checkpoint between a base and a tuned model (WiSE-FT)",
    "methods": "list every method, by stage",
    "report": "draw again what compare, measure or merge has written",
    "score": "what the pretrained model finds easy: losses and FLOW's weights of a dataset",
    "tune": "find a recipe's settings by Optuna: target against retained",
}
_LONGEST = 600  # characters of an error's text


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
        _say(f"there is no subcommand {name!r}{hint}")
        return 2
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary files go
    _quieten()
    with _lines_on_stderr():
        return _run(name, rest, traceback)


def _run(name: str, arguments: Sequence[str], traceback: bool) -> int:
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            import_module(f"holdfast.cli.{name}").main(arguments)
        sys.stdout.flush()  # a full disk shows here rather than at exit
    except BrokenPipeError:  # the reader, such as head, has seen enough
        sys.stderr.close()
    except KeyboardInterrupt:
        _say("stopped; what was finished is kept")
        return 130
    except Exception as error:
        if traceback:
            raise
        _say(_sentence(error))
        return 1
    return 0


def _sentence(error: Exception) -> str:
    """What failed. What the user can do something about is told in the error's own words."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        where = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([" → ".join(where), error.strerror]) if where else error.strerror
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} …"
    if isinstance(error, ValueError | OSError | ImportError) and text:
        return text
    kind = type(error).__name__
    return f"{kind}: {text or 'no more is told'} (--traceback shows where it comes from)"


class _Lines:
    """A stream that knows whether a line is begun, as a progress bar leaves it."""

    def __init__(self, stream: Any) -> None:
        self.stream, self.begun = stream, False

    def write(self, text: str) -> int:
        self.begun = not text.endswith("\n") if text else self.begun
        return int(self.stream.write(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextlib.contextmanager
def _lines_on_stderr() -> Iterator[None]:
    before = sys.stderr
    sys.stderr = cast(TextIO, _Lines(before))
    try:
        yield
    finally:
        sys.stderr = before


def _say(sentence: str) -> None:
    """On a line of its own."""
    start = "\n" if getattr(sys.stderr, "begun", False) else ""
    print(f"{start}holdfast: {sentence}", file=sys.stderr)


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"warning: {' '.join(str(message).split())}", file=sys.stderr)


def _quieten() -> None:
    """No chatter of transformers; in a log, no bars either. What the user has set stays.

    By the environment, which the processes of a comparison inherit.
    """
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # A process that is killed leaves tqdm's lock behind, which the system removes.
    asked = os.environ.get("PYTHONWARNINGS")
    if "resource_tracker" not in (asked or ""):
        ours = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = f"{asked},{ours}" if asked else ours
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


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
