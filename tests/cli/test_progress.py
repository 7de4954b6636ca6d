"""How far long work is: lines in a log, bars on a terminal."""

import os
import re
import select
import sys

import pytest

from holdfast.cli._progress import Progress


def do(total, before):
    with Progress(total, "runs", before) as progress:
        progress.update("flow, seed 0", 20, 40, "training")
        progress.update("recadam, seed 0", 1, 40, "training")
        progress.update("flow, seed 0", 0, 1, "testing")
        progress.finished("flow, seed 0", "done")
        progress.finished("recadam, seed 0", "failed: [bold]no")


def test_lines(capsys):
    do(5, 3)
    first, second = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\[4/5\] flow, seed 0: done \(about \S+ s left\)", first)
    assert second == "[5/5] recadam, seed 0: failed: [bold]no"


def on_a_terminal(monkeypatch):
    """What is written to stderr by the work, when it is a terminal."""
    pytest.importorskip("pty")
    ours, theirs = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with os.fdopen(theirs, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        do(5, 3)
        stderr.flush()
        seen = ""
        while select.select([ours], [], [], 0.2)[0]:  # a read may give a part of it
            seen += os.read(ours, 100_000).decode()
    os.close(ours)
    return re.sub(r"\x1b\[[0-9;?]*\w", "", seen)


def test_bars(monkeypatch):
    pytest.importorskip("rich")
    seen = on_a_terminal(monkeypatch)
    assert re.search(r"runs +[━╺╸ ]+ 3/5", seen)
    for line in ("[4/5] flow, seed 0: done", "[5/5] recadam, seed 0: failed: [bold]no"):
        assert seen.count(line) == 1


def test_a_terminal_without_rich_has_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    lines = on_a_terminal(monkeypatch).splitlines()
    assert [line[:5] for line in lines] == ["[4/5]", "[5/5]"]
