"""Completion, as it happens in the shells themselves."""

import fcntl
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import time

import pytest

from holdfast.cli import main

pytest.importorskip("shtab", reason="the cli extra is not installed")

#: What is typed after ``holdfast``, and what a tab makes of it.
TYPED = {
    "meas": "measure",
    "measure --tex": "measure --text",
    "measure --dtype bf": "measure --dtype bfloat16",
    "measure a my": r"measure a my\ data.jsonl",
    "measure a b --text train.jsonl my": r"measure a b --text train.jsonl my\ data.jsonl",
    "measure a b --text train.jsonl --devi": "measure a b --text train.jsonl --device",
    "measure a b --model-card REA": "measure a b --model-card README.md",
    "finetune --out mo": "finetune --out models/",
    "finetune --recipe reci": "finetune --recipe recipe.yaml",
    "finetune --recipe recadam+flow+wis": "finetune --recipe recadam+flow+wise-ft",
    "compare --recipes standard lora+recad": "compare --recipes standard lora+recadam",
    "compare --recipes standard --see": "compare --recipes standard --seeds",
    "report train.jsonl my": r"report train.jsonl my\ data.jsonl",
    "completion z": "completion zsh",
}
#: Arguments of a shell without the user's settings, and what a user puts into these. Ctrl-O shows
#: the line that is being edited.
SHELLS = {
    "bash": (
        ["--norc", "--noprofile", "-i"],
        'show() { echo "<$READLINE_LINE>"; READLINE_LINE=; }; bind -x \'"\\C-o": show\'; '
        "bind 'set enable-bracketed-paste off'; source ./script",
    ),
    "zsh": (
        ["-f", "-i"],
        "show() { zle -I; print -r -- \"<$BUFFER>\"; BUFFER= }; zle -N show; bindkey '^O' show; "
        "mv script _holdfast; fpath=($PWD $fpath); autoload -U compinit; compinit -u -D",
    ),
}


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    """A folder with files to complete, which returns the name of a shell's script in it."""
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "my data.jsonl", "recipe.yaml", "README.md"):
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()

    def script(shell):
        if shutil.which(shell) is None:
            pytest.skip(f"needs {shell} on the PATH")
        assert main(["completion", shell]) == 0
        (tmp_path / "script").write_text(capsys.readouterr().out)

    return script


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, shell):
        options, setup = SHELLS[shell]
        self.ours, theirs = pty.openpty()
        wide = struct.pack("HHHH", 50, 300, 0, 0)  # so that lines are not wrapped
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, wide)
        self.process = subprocess.Popen(
            [shell, *options], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "dumb", "PS1": "$ ", "HISTFILE": "", "INPUTRC": os.devnull},
        )  # fmt: skip
        os.close(theirs)
        self.seen = ""
        self.type(f"{setup}; echo rea''dy\n")
        self.wait("\nready")

    def type(self, text):
        os.write(self.ours, text.encode())

    def wait(self, pattern):
        until = time.monotonic() + 30
        while not (found := re.search(pattern, self.seen)):
            assert time.monotonic() < until, f"no {pattern!r} in {self.seen[-1000:]!r}"
            if select.select([self.ours], [], [], 0.1)[0]:
                self.seen += os.read(self.ours, 1 << 16).decode(errors="replace")
        self.seen = self.seen[found.end() :]
        return found

    def completed(self, text):
        self.type(f"holdfast {text}\t\x0f")
        return self.wait("<holdfast ([^\r\n>]*)>")[1].rstrip(" ")

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


@pytest.mark.parametrize("shell", SHELLS)
def test_a_tab_completes(shell, folder):
    folder(shell)
    terminal = Terminal(shell)
    try:
        assert {text: terminal.completed(text) for text in TYPED} == TYPED
    finally:
        terminal.close()


def test_fish_completes(folder):
    folder("fish")
    lines = "\n".join(f"complete -C 'holdfast {text}'; echo" for text in TYPED)
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"source ./script\n{lines}"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    found = [re.findall(r"^[^\t\n]+", part, re.MULTILINE) for part in done.stdout.split("\n\n")]
    words = [whole.replace(r"\ ", "_").rpartition(" ")[2] for whole in TYPED.values()]
    assert found[: len(words)] == [[word.replace("_", " ")] for word in words]
