"""The gate: each limit on its figures."""

import math
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from holdfast.evaluate.gate import Gate, Limits, check
from holdfast.evaluate.report import (
    Divergence,
    Drift,
    DriftRow,
    Estimate,
    ForgettingReport,
    Score,
)


def at(value, margin=0.1):
    return Estimate(value, value - margin, value + margin, 64)


def score(metric, before, after, *, lower, role="retained", name="test"):
    return Score(name, metric, lower, at(before), at(after), at(after - before, 0.005), role)


REPORT = ForgettingReport(
    "base",
    "tuned",
    drift=Drift(DriftRow("", 3.0, 100.0, 10), (), (), ()),
    divergences=(
        Divergence("gsm", at(9.0), 100, "token", ""),
        Divergence("context-free", at(0.04, 0.005), 100, "token", ""),
    ),
    scores=(
        score("perplexity", 10.0, 10.3, lower=True, name="wiki"),
        score("nll", 2.0, 2.05, lower=True, name="verse"),
        score("skill_perplexity", 10.0, 12.0, lower=True, name="code"),
        score("accuracy", 0.7, 0.68, lower=False, name="piqa"),
        score("exact_match", 0.1, 0.5, lower=False, role="target", name="gsm"),
    ),
)


@pytest.mark.parametrize(
    ("limits", "failed"),
    [
        ({"max_perplexity_rise": 0.06}, []),
        ({"max_perplexity_rise": 0.04}, ["verse"]),  # exp(.05) − 1 = 5.1 %
        ({"max_perplexity_rise": 0.02}, ["wiki", "verse"]),
        ({"max_skill_rise": 0.25}, []),
        ({"max_skill_rise": 0.15}, ["code"]),
        ({"max_drop": 0.03}, []),
        ({"max_drop": 0.01}, ["piqa"]),
        ({"max_kl": 0.05}, []),  # not on the target, whose predictions are to change
        ({"max_kl": 0.03}, ["context-free"]),
        ({"max_drift": 0.04}, []),
        ({"max_drift": 0.02}, ["all weights"]),
        ({"min_target": 0.4}, []),
        ({"min_target": 0.6}, ["gsm exact_match"]),
    ],
)
def test_each_limit(limits, failed):
    gate = check(REPORT, Limits(**limits))
    assert [one.name for one in gate.checks if not one.passed] == failed
    assert gate.passed == (not failed)
    assert Gate.from_json(gate.to_json()) == gate


def test_a_target_that_should_be_low():
    report = ForgettingReport("a", "b", scores=(score("nll", 2, 1, lower=True, role="target"),))
    assert check(report, Limits(max_target_loss=1.1)).passed
    assert not check(report, Limits(max_target_loss=0.9)).passed
    with pytest.raises(ValueError, match="no target has a score of which more is better"):
        check(report, Limits(min_target=0.5))


def test_a_training_signal_passes_nothing():
    trained = tuple(replace(d, trained_on=d.name == "context-free") for d in REPORT.divergences)
    report = replace(REPORT, divergences=trained)
    with pytest.raises(ValueError, match="training signal of this model, so max_kl has nothing"):
        check(report, Limits(max_kl=0.1))
    gate = check(report, Limits(max_kl=0.01, max_drop=0.03))
    assert [one.limit for one in gate.checks] == ["max_drop"]
    assert "own texts was a training signal: it is no evidence" in gate.to_markdown()


def test_nan_never_passes():
    broken = ForgettingReport("a", "b", scores=(score("perplexity", 10.0, math.nan, lower=True),))
    assert not check(broken, Limits(max_perplexity_rise=1e9)).passed


def test_a_limit_of_nothing_is_an_error():
    empty = ForgettingReport("a", "b")
    for name in vars(Limits()):
        with pytest.raises(ValueError, match=f"{name} has nothing to limit"):
            check(empty, Limits(**{name: 0.1}))
    with pytest.raises(ValueError, match="at least one limit"):
        check(REPORT, Limits())
    with pytest.raises(ValueError, match="max_kl must be"):
        Limits(max_kl=-1)


def test_the_texts_say_what_failed_and_what_is_close():
    gate = check(REPORT, Limits(max_perplexity_rise=0.02, max_kl=0.042))
    said = gate.to_markdown()
    assert "Failed: 2 of 3 figures are beyond the limit." in said
    assert "wiki: rise of the perplexity 3.0 %, limit 2.0 %." in said
    assert "The limit lies within the interval on context-free" in said
    suites = ET.fromstring(gate.to_junit().encode())
    assert suites.attrib["tests"] == "3"
    assert suites.attrib["failures"] == "2"
    cases = {case.attrib["name"]: [x.attrib["message"] for x in case] for case in suites[0]}
    assert cases["context-free"] == []
    assert cases["verse"] == ["rise of the perplexity 5.1 %, limit 2.0 %"]
