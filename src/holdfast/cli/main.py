"""The entry point: finds the command, runs it, and reports an error in one sentence."""

import contextlib
import errno
import io
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Collection, Sequence
from importlib import import_module

import holdfast
from holdfast._torch.checks import did_you_mean
from holdfast.cli._guard import Failed, log_lines, say
from holdfast.cli._options import Parser, UsageError, config_text
from holdfast.cli._processes import is_first, is_launched
from holdfast.report.printing import tell

#: Each command is a module of this package with ``add_options`` and ``run``.
COMMANDS = {
    "check": "check that a fine-tuned model forgot no more than it may",
    "compare": "fine-tune with many recipes and compare them on your data",
    "completion": "print the completion script of a shell",
    "data": "show what a model would learn from data",
    "draw": "show texts that a language model writes",
    "finetune": "fine-tune a model with one recipe",
    "measure": "measure what a fine-tuned model forgot",
    "merge": "merge tuned checkpoints with their base, without training",
    "methods": "list all methods",
    "plan": "estimate the memory and time of a training",
    "report": "show the saved results of compare, measure or merge again",
    "score": "compute the losses and FLOW weights of a dataset",
    "tune": "search the best recipe and its settings",
}
_LONGEST = 600  # characters of an error message
#: Errors of the system that wrong input causes; others, such as a full disk, are failures.
_WRONG_INPUT = (
    errno.EACCES, errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG,
    errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status: 0, 1 (failed), 2 (wrong input) or 130 (Ctrl-C)."""
    if sys.stderr is None:  # it was closed
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    interrupts = _Interrupts()
    try:
        with interrupts:
            return _main(list(sys.argv[1:] if arguments is None else arguments), interrupts)
    except KeyboardInterrupt:
        if arguments is None:  # a second one would only disturb the end of the process
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        say("stopped; what was finished is kept")
        return 130


class _Interrupts:
    """Remember Ctrl-C, because imports may turn the exception into another one."""

    seen = False

    def __enter__(self) -> None:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            with contextlib.suppress(ValueError):  # not the main thread
                signal.signal(signal.SIGINT, self._interrupt)

    def __exit__(self, *_: object) -> None:
        if signal.getsignal(signal.SIGINT) == self._interrupt:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _interrupt(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt


def _main(words: list[str], interrupts: _Interrupts) -> int:
    show_traceback = "--traceback" in words or bool(os.environ.get("HOLDFAST_TRACEBACK"))
    words = [word for word in words if word != "--traceback"] or ["--help"]
    if sys.stdout is None:  # the next file to be opened would take its number
        say("the standard output is closed: redirect it, for example to /dev/null")
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for terminals that cannot show θ and τ
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # removes temporary files
    _quieten()
    try:
        with warnings.catch_warnings(), log_lines():
            warnings.showwarning = lambda message, *_, **__: say(message, "warning")
            _run(words)
        sys.stdout.flush()  # a full disk fails here, not at exit
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        # Python would complain at exit about what it cannot write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except UsageError as error:
        if is_first():  # all processes of a launcher read the same words
            say(error)
        return 2
    except Exception as error:
        if interrupts.seen:
            raise KeyboardInterrupt from error
        if show_traceback:
            tell(traceback.format_exc(), file=sys.stderr, end="")
        else:
            say(_sentence(error))
        return 2 if _is_wrong_input(error) else 1
    return 0


def _run(words: Sequence[str]) -> None:
    parser, commands = make_parser(words[:1])
    if is_launched() and words[0] != "finetune":
        raise UsageError(
            f"holdfast {words[0]} runs in one process: start it without torchrun or accelerate "
            "launch, which only finetune supports"
        )
    if words[0] in COMMANDS:
        options = commands[words[0]].parse(words[1:])
        if getattr(options, "print_config", False):
            tell(config_text(options), end="")
        elif words[0] == "completion":
            completion = import_module("holdfast.cli.completion")
            completion.run(options, *make_parser())  # with the options of all commands
        else:
            import_module(f"holdfast.cli.{words[0]}").run(options)
    elif words[0].startswith("-"):
        parser.parse(words)
    else:
        raise UsageError(
            f"unknown command {words[0]!r}{did_you_mean(words[0], COMMANDS, cutoff=0.7)}"
        )


def make_parser(complete: Collection[str] = tuple(COMMANDS)) -> tuple[Parser, dict[str, Parser]]:
    """Build the parser of ``holdfast`` and those of its commands.

    Only the commands in ``complete`` get their options, which import the modules behind them.
    """
    parser = Parser(
        prog="holdfast",
        usage="holdfast COMMAND [options]",
        description=(holdfast.__doc__ or "").partition("\n")[0],
        epilog="`holdfast COMMAND --help` lists the options of a command.",
    )
    parser.add_argument("--version", action="version", version=f"holdfast {holdfast.__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the traceback of an error")
    added = parser.add_subparsers(metavar="COMMAND", title="commands")
    commands = {
        name: added.add_parser(name, help=text, prog=f"holdfast {name}")
        for name, text in COMMANDS.items()
    }
    for name in complete:
        if name in COMMANDS:
            import_module(f"holdfast.cli.{name}").add_options(commands[name])
    return parser, commands


def _sentence(error: Exception) -> str:
    """Describe an error; one that users cannot cause gets its type and a hint at --traceback."""
    text = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        where = [str(name) for name in (error.filename, error.filename2) if name is not None]
        text = ": ".join([" → ".join(where), error.strerror]) if where else error.strerror
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]} …"
    if isinstance(error, ValueError | OSError | ImportError | Failed) and text:
        return text
    kind = type(error).__name__
    return f"{kind}: {text or 'no message'} (--traceback shows where it was raised)"


def _is_wrong_input(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno is None or error.errno in _WRONG_INPUT
    return isinstance(error, ValueError)


def _quieten() -> None:
    """Silence libraries, also in worker processes, unless the user has set otherwise."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # A killed process leaves tqdm's lock behind, which the system removes.
    asked = os.environ.get("PYTHONWARNINGS")
    if "resource_tracker" not in (asked or ""):
        ours = "ignore:resource_tracker:UserWarning"
        os.environ["PYTHONWARNINGS"] = f"{asked},{ours}" if asked else ours
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
