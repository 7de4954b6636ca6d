"""The entry point: errors, warnings and exit codes of any subcommand."""

import ast
import logging
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

import holdfast
from holdfast.cli import main
from holdfast.cli.main import COMMANDS


@pytest.fixture
def doing(monkeypatch):
    """Make ``holdfast methods`` do something else."""

    def set_main(function):
        module = types.SimpleNamespace(run=lambda _: function(), add_options=lambda _: None)
        monkeypatch.setitem(sys.modules, "holdfast.cli.methods", module)

    return set_main


def raising(error):
    def function():
        raise error

    return function


@pytest.mark.parametrize(
    ("error", "sentence", "status"),
    [
        (ValueError("lr must be > 0"), "lr must be > 0", 2),
        (ValueError("a\n  long\n\nstory"), "a long story", 2),
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b: Permission denied", 2),
        (OSError(28, "No space left on device"), "No space left on device", 1),
        (OSError("no such model"), "no such model", 2),
        (ImportError("install this"), "install this", 1),
        (
            RuntimeError("CUDA out of memory"),
            "RuntimeError: CUDA out of memory (--traceback shows where it was raised)",
            1,
        ),
        (
            KeyError("weight"),
            "KeyError: 'weight' (--traceback shows where it was raised)",
            1,
        ),
        (
            MemoryError(),
            "MemoryError: no message (--traceback shows where it was raised)",
            1,
        ),
    ],
)
def test_an_error_is_one_sentence(error, sentence, status, doing, capsys):
    doing(raising(error))
    assert main(["methods"]) == status
    assert capsys.readouterr().err == f"holdfast: {sentence}\n"


def test_a_long_error_is_cut(doing, capsys):
    doing(raising(RuntimeError("word " * 1000)))
    assert main(["methods"]) == 1
    assert len(capsys.readouterr().err) < 800


def test_traceback_shows_where(doing, monkeypatch, capsys):
    doing(raising(ValueError("here \x1b[31m")))
    assert main(["methods", "--traceback"]) == 2
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "1")
    assert main(["methods"]) == 2
    said = capsys.readouterr().err
    assert said.count("Traceback (most recent call last)") == 2
    assert said.endswith("ValueError: here \\u001b[31m\n")


def test_control_c(doing, capsys):
    doing(raising(KeyboardInterrupt()))
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "holdfast: stopped; what was finished is kept\n"


#: Ctrl-C during imports, where the module of a command and its packages are loaded.
EARLY = """
import os, signal, sys
from holdfast.cli import main

class Interrupting:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupting())
sys.argv = ["holdfast", "methods"]
sys.exit(main())
"""


def test_control_c_that_an_import_turns_into_another_error(doing, capsys):
    def interrupted():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise ImportError("cannot load module more than once per process") from None

    doing(interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "holdfast: stopped; what was finished is kept\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_control_c_in_the_first_seconds():
    done = subprocess.run([sys.executable, "-c", EARLY], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "holdfast: stopped; what was finished is kept\n"


def test_a_closed_output_is_said():
    command = [sys.executable, "-m", "holdfast", "methods"]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: os.close(1),
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("holdfast: the standard output is closed")


def test_what_is_logged_controls_no_terminal(doing, capsys):
    def log():
        for name in ("holdfast", "transformers"):
            logging.getLogger(name).error("of %s", "\x1b[31mred\x9b2J")

    doing(log)
    assert main(["methods"]) == 0
    said = capsys.readouterr().err
    assert "red" in said
    assert not {"\x1b", "\x9b"} & {*said}


def test_only_one_module_prints():
    """Every other module calls its functions, which keep control characters from the terminal."""
    found = {
        file.name
        for file in Path(holdfast.__file__).parent.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
    }
    assert found == {"printing.py"}


def test_warnings_are_one_line(doing, capsys):
    def warn():
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("one\nsample", stacklevel=1)

    doing(warn)
    before = warnings.showwarning
    assert main(["methods"]) == 0
    assert capsys.readouterr().err == "warning: one sample\n"
    assert warnings.showwarning is before


def test_libraries_are_quiet_unless_asked(doing, monkeypatch):
    doing(lambda: None)
    for name in ("TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    main(["methods"])
    assert os.environ["TRANSFORMERS_VERBOSITY"] == "error"
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == "1"
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"


def test_help_lists_every_subcommand(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert all([name, text] in lines for name, text in COMMANDS.items())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("repor", "unknown command 'repor'; did you mean 'report'"),
        ("qqq", "unknown command 'qqq'; known: check, compare"),
        ("-x", "unknown option -x; known: "),
    ],
)
def test_no_such_subcommand(given, words, capsys):
    assert main([given]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: {words}")
