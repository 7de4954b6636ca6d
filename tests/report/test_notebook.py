"""Results in notebooks and shells: a short repr, HTML without scripts, pandas."""

import re
from dataclasses import replace

import pytest

from holdfast.comparison.results import Measured, Results, RunResult
from holdfast.evaluate.gate import Limits, check
from holdfast.evaluate.report import Estimate, ForgettingReport, Score
from holdfast.evaluate.sweep import Sweep, SweepPoint
from holdfast.recipe import Recipe

NAME = "<script>alert(1)</script>"


def at(value):
    return Estimate(value, value - 0.01, value + 0.01, 64)


REPORT = ForgettingReport(
    NAME, "tuned", scores=(Score(NAME, "perplexity", True, at(10.0), at(11.0), at(1.0)),)
)
TARGET = Measured("gsm", "nll", True, 2.0, 1.0, -1.1, -0.9, 64)
RESULTS = Results((RunResult("a-0", "recadam", 0, TARGET, (), None, {}, 1.0, 1),))
SHOWN = {
    "report": REPORT,
    "gate": check(REPORT, Limits(max_perplexity_rise=0.5)),
    "sweep": Sweep(
        "base", "tuned", (SweepPoint({"alpha": 0.0}, REPORT), SweepPoint({"alpha": 1.0}, REPORT))
    ),
    "results": RESULTS,
}


@pytest.mark.parametrize("kind", SHOWN)
def test_a_short_repr_and_escaped_html(kind):
    shown = SHOWN[kind]
    assert repr(shown).startswith(f"<{type(shown).__name__} ")
    assert len(repr(shown)) < 300
    html = shown._repr_html_()
    assert "<table>" in html
    assert "<script>" not in html
    assert len(html) < 20_000


def test_what_was_not_measured_is_said():
    html = replace(REPORT, notes=(f"{NAME} was left out.",))._repr_html_()
    assert "was left out." in html
    assert "<script>" not in html


def test_figures_as_a_table():
    pytest.importorskip("pandas", reason="the hf extra is not installed")
    frames = {kind: shown.to_pandas() for kind, shown in SHOWN.items()}
    assert frames["report"].loc[0, "change"] == 1.0
    assert list(frames["sweep"]["alpha"]) == [0.0, 1.0]
    assert frames["gate"].loc[0, "passed"]
    assert frames["results"].loc[0, "recipe"] == "recadam"


def test_a_recipe():
    html = Recipe.preset("recadam+flow")._repr_html_()
    assert re.search("<th[^>]*>objective</th><td[^>]*>flow", html)
