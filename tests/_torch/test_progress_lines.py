"""Progress where there is no terminal: a line now and then."""

import re
import sys
from types import ModuleType, SimpleNamespace

import pytest

from holdfast._torch import progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.Lines, "said", None)
    return now


def test_a_line_now_and_then(clock, capsys):
    for name in ("first", "sec\x1bond"):  # parts share the time since the last line
        with progress.progress_bar(40, name, shown=True) as bar:
            for _ in range(2):
                bar.update(10)
                clock[0] += 10
    bar.update(10)
    bar.update(10)
    assert capsys.readouterr().err == "sec ond: 20 of 40 samples, about 10 s left\n"


def test_a_total_that_is_not_known(clock, capsys):
    bar = progress.progress_bar(None, "text", shown=True, unit="token")
    clock[0] += 31
    bar.update(1000)
    assert capsys.readouterr().err == "text: 1,000 tokens\n"


def test_no_estimate_from_the_first_samples(clock, capsys):
    bar = progress.progress_bar(100, "text", shown=True)
    clock[0] += 31
    bar.update(5)
    assert re.fullmatch(r"text: 5 of 100 samples\n", capsys.readouterr().err)


def test_nothing_is_shown(clock, capsys):
    bar = progress.progress_bar(100, "text", shown=False)
    clock[0] += 31
    bar.update(50)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("widgets", [False, True])
def test_bars_in_a_notebook(widgets, monkeypatch):
    """Of text without ipywidgets, where tqdm.auto would warn."""
    pytest.importorskip("tqdm", reason="the hf extra is not installed")
    kernel = ModuleType("IPython")
    kernel.get_ipython = lambda: SimpleNamespace(config={"IPKernelApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: widgets or None)
    bars = progress._bars()
    assert bars.__name__ == ("tqdm_notebook" if widgets else "tqdm")
    if not widgets:
        with progress.progress_bar(2, "text", shown=False) as bar:
            bar.update(2)
