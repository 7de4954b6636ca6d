import json
import math
import re
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import given

from holdfast.evaluate.report import (
    Curve,
    Divergence,
    DriftRow,
    Estimate,
    ForgettingReport,
    Score,
)
from report.reports import reports
from report.sample_report import sample

SCHEMA = json.loads(
    (Path(__file__).parents[2] / "docs" / "schema" / "forgetting-report-1.json").read_text()
)
KL = Estimate(0.1, None, None, 2)


def validate(text):
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(text))


def test_it_goes_to_json_and_comes_back():
    report = sample()
    text = report.to_json()
    assert ForgettingReport.from_json(text) == report
    validate(text)


@given(reports)
def test_any_report_goes_to_json_and_comes_back(report):
    text = report.to_json()
    text.encode()  # lone surrogates are gone
    validate(text)
    assert ForgettingReport.from_json(text).to_json() == text


def test_what_is_not_finite_survives():
    odd = Estimate(math.nan, -math.inf, math.inf, 3)
    text = ForgettingReport("a", "b", divergences=(Divergence("x", odd, 1, "token", ""),)).to_json()
    kl = json.loads(text)["divergences"][0]["kl"]
    assert kl == {"value": "NaN", "low": "-Infinity", "high": "Infinity", "n": 3}
    back = ForgettingReport.from_json(text).divergences[0].kl
    assert math.isnan(back.value)
    assert (back.low, back.high) == (-math.inf, math.inf)
    validate(text)


def test_numpy_and_lists_are_taken():
    made = Estimate(np.float32(0.5), None, None, np.int64(3))
    report = ForgettingReport("a", "b", divergences=[Divergence("x", made, 1, "token", "")])
    back = ForgettingReport.from_json(report.to_json())
    assert back.divergences == (Divergence("x", Estimate(0.5, None, None, 3), 1, "token", ""),)


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="a complex cannot be written as JSON"):
        ForgettingReport("a", "b", settings={"model": 1j}).to_json()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema_version": 2},
            "schema_version 2, but this version of holdfast reads at most 1: update",
        ),
        ({"schema_version": True}, "it has no schema_version"),
        ({"colour": 1}, "the forgetting report: unknown key 'colour'"),
        ({"base": 1}, "the forgetting report.base: must be text, got 1"),
        ({"base": None}, "report.base: must be text, got None"),
        ({"drift": []}, "report.drift: must be an object, got []"),
        ({"notes": "x"}, "report.notes: must be a list, got 'x'"),
        ({"settings": {"a": []}}, "report.settings['a']: "),
        ({"curves": [{"name": "a", "steps": [1], "values": []}]}, "1 steps and 0 values"),
        ({"curves": [{"name": "a", "steps": [1.5], "values": [1]}]}, "steps[0]: must be a whole"),
        ({"curves": [{"name": "a", "steps": [True], "values": [1]}]}, "steps[0]: must be a whole"),
        ({"curves": [{"name": "a", "steps": [1], "values": ["x"]}]}, "values[0]: must be a number"),
        ({"curves": [{"name": "a", "steps": []}]}, "the key 'values' is missing"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(change, message):
    value = {"base": "a", "tuned": "b", "schema_version": 1} | change
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ForgettingReport.from_json(json.dumps(value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "1", '{"base": NaN}', "[" * 100_000, '{"base": "a"}']
)
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match="this is not"):
        ForgettingReport.from_json(text)


def test_fields_are_checked_when_made():
    with pytest.raises(ValueError, match="role must be 'retained' or 'target', got 'both'"):
        Score("a", "nll", True, KL, KL, KL, role="both")
    with pytest.raises(ValueError, match="the curve 'a' has 2 steps and 1 values"):
        Curve("a", (1, 2), (0.5,))


def test_it_is_saved_whole_and_loaded(tmp_path, monkeypatch):
    path = tmp_path / "report.json"
    sample().save(path)
    assert ForgettingReport.load(path) == sample()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        replace(sample(), base="other").save(path)
    assert ForgettingReport.load(path) == sample()
    assert list(tmp_path.iterdir()) == [path]


def test_the_name_tells_the_form(tmp_path):
    sample().save(tmp_path / "report.md")
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == sample().to_markdown()


def test_a_file_that_is_no_report_is_named(tmp_path):
    path = tmp_path / "odd.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"odd\.json"):
        ForgettingReport.load(path)


def test_the_schema_is_one_and_is_strict():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for change in ({"colour": 1}, {"schema_version": 2}, {"scores": [{}]}):
        value = json.loads(ForgettingReport("a", "b").to_json()) | change
        with pytest.raises(jsonschema.ValidationError):
            validate(json.dumps(value))


def test_relative_drift():
    assert DriftRow("a", 1.0, 4.0, 1).relative == 0.25
    assert DriftRow("a", 0.0, 0.0, 1).relative == 0.0
    assert DriftRow("a", 1.0, 0.0, 1).relative == math.inf
