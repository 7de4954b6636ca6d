"""How far long work is: lines in a log, bars on a terminal."""

import os
import re
import select
import shutil
import sys
from pathlib import Path

import pytest

from holdfast._torch import progress
from holdfast.cli import main
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


@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["score"], "scoring: 2 of 2 samples"),
        (["finetune", "--recipe=flow", "--lr=1e-3", "--out=out"], "scoring: 2 of 2 samples"),
        (["draw", "--texts=2"], "drawing texts: 64 of"),
    ],
)
def test_a_log_has_lines_now_and_then(command, line, monkeypatch, tmp_path, capsys):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from comparison.tiny import save_llama

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    Path("train.jsonl").write_text('{"prompt": "two plus two is", "completion": "four"}\n' * 2)
    command += [f"--model={save_llama('llama')}"]
    command += [] if command[0] == "draw" else ["--data=train.jsonl"]
    assert main(command) == 0
    assert line not in capsys.readouterr().err  # it takes a moment only
    monkeypatch.setattr(progress, "QUIET", 0.0)
    shutil.rmtree("cache")
    shutil.rmtree("out", ignore_errors=True)
    assert main(command) == 0
    assert line in capsys.readouterr().err
