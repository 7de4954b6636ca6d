"""The entry point: errors, warnings and exit codes of any subcommand."""

import os
import sys
import types
import warnings

import pytest

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
    ("error", "sentence"),
    [
        (ValueError("lr must be > 0"), "lr must be > 0"),
        (ValueError("a\n  long\n\nstory"), "a long story"),
        (PermissionError(13, "Permission denied", "/a/b"), "/a/b: Permission denied"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (OSError("the disk is gone"), "the disk is gone"),
        (ImportError("install this"), "install this"),
        (
            RuntimeError("CUDA out of memory"),
            "RuntimeError: CUDA out of memory (--traceback shows where it was raised)",
        ),
        (
            KeyError("weight"),
            "KeyError: 'weight' (--traceback shows where it was raised)",
        ),
        (
            MemoryError(),
            "MemoryError: no message (--traceback shows where it was raised)",
        ),
    ],
)
def test_an_error_is_one_sentence(error, sentence, doing, capsys):
    doing(raising(error))
    assert main(["methods"]) == 1
    assert capsys.readouterr().err == f"holdfast: {sentence}\n"


def test_a_long_error_is_cut(doing, capsys):
    doing(raising(RuntimeError("word " * 1000)))
    assert main(["methods"]) == 1
    assert len(capsys.readouterr().err) < 800


def test_traceback_shows_where(doing, monkeypatch):
    doing(raising(ValueError("here")))
    with pytest.raises(ValueError, match="here"):
        main(["methods", "--traceback"])
    monkeypatch.setenv("HOLDFAST_TRACEBACK", "1")
    with pytest.raises(ValueError, match="here"):
        main(["methods"])


def test_control_c(doing, capsys):
    doing(raising(KeyboardInterrupt()))
    assert main(["methods"]) == 130
    assert capsys.readouterr().err == "holdfast: stopped; what was finished is kept\n"


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
        ("qqq", "unknown command 'qqq'; known: compare, completion"),
        ("-x", "unknown option -x; known: "),
    ],
)
def test_no_such_subcommand(given, words, capsys):
    assert main([given]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"holdfast: {words}")
