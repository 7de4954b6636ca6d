"""The page of every kind of result: self-contained, inert, and drawn for any input."""

import base64
import gzip
import hashlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.comparison.results import Results
from holdfast.evaluate.report import Curve, Divergence, ForgettingReport
from holdfast.evaluate.sweep import Sweep, SweepPoint
from holdfast.report import html
from report.reports import HOSTILE, names, reports
from report.sample_report import estimate, sample
from report.sample_results import TESTS, every_results, run, sample_results
from report.sample_sweep import TARGET, sample_sweep
from report.sample_sweep import TESTS as SWEEP_TESTS

sweeps = st.lists(st.tuples(st.floats(0, 1), reports), min_size=1, max_size=3).flatmap(
    lambda found: st.builds(
        Sweep,
        names,
        names,
        st.just(tuple(SweepPoint({"alpha": a}, dict(found)[a]) for a in sorted(dict(found)))),
    )
)


def block(page, name):
    return re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)[1]


def hostile_report(name):
    """The sample with one name everywhere."""
    report = sample()
    rows = [replace(row, name=name, kind=name, layer=name) for row in report.drift.tensors[:9]]
    moved = replace(
        report.drift,
        layers=tuple(replace(row, name=name) for row in report.drift.layers[:3]),
        kinds=tuple(rows),
        tensors=tuple(rows),
        only_base=(name,),
        only_tuned=(name,),
        not_finite=(name,),
    )
    return ForgettingReport(
        base=name,
        tuned=name,
        drift=moved,
        divergences=(Divergence(name, estimate(0.1, 0.01, 9), 9, name, name),),
        scores=(
            *(replace(score, name=name) for score in report.scores),
            replace(report.scores[0], name=name, metric=name),
        ),
        curves=(Curve(name, (1, 2), (0.5, float("nan"))),),
        notes=(name,),
        settings={name: name},
        versions={name: name, "holdfast": name},
    )


def hostile_sweep(name):
    tests = {f"{name}{i}": test for i, test in enumerate(SWEEP_TESTS.values())}
    return replace(sample_sweep(tests), base=name, tuned=name)


def hostile_results(name):
    tests = {f"{name}{i}": test for i, test in enumerate(TESTS.values())}
    runs = (run(f"{name}{i}", 0, 0.7, 0.1 * i, tests, versions={name: name}) for i in range(3))
    return Results(tuple(runs), failed={name: name}, plan={"model": name, "data": name, name: name})


def check_figures(page):
    """Plotly knows every attribute of the figures, and their texts hold no other HTML."""
    for figure in json.loads(block(page, "figures")):
        text = json.dumps(figure, allow_nan=False)
        go.Figure(json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#000000", text)))
        for text in re.findall(r"<[^<>]*", "".join(_texts(figure))):
            assert re.match(r"</?(b|br)>", text + ">"), text


def _texts(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


@pytest.mark.parametrize("found", [sample(), sample_sweep(), sample_results()], ids=type)
def test_the_result_is_in_its_page(found):
    page = found.to_html()
    assert type(found).from_json(block(page, "report")) == found
    headline = re.search("<h1>(.*?)</h1>", page)[1]
    assert re.sub("</?span>", "", headline) == found.document().answer.headline
    assert "http:" not in page
    assert "https:" not in page


def hashed(script):
    return f"'sha256-{base64.b64encode(hashlib.sha256(script).digest()).decode()}'"


def test_only_the_own_scripts_may_run():
    page = sample().to_html()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    (own,) = re.findall(r"<script>(.*?)</script>", page, re.S)
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page)[1]
    library = gzip.decompress(base64.b64decode(packed))
    assert policy.partition("; style-src")[0] == (
        f"default-src 'none'; script-src {hashed(own.encode())} {hashed(library)}"
    )


def test_plotly_is_the_published_file():
    folder = Path(html.__file__).parent / "plotly"
    script = gzip.decompress((folder / "plotly-cartesian.min.js.gz").read_bytes())
    told = (folder / "README.md").read_text()
    assert hashlib.sha256(script).hexdigest() in told
    version = re.search(rb"plotly.js \(cartesian - minified\) v(\S+)", script)[1].decode()
    assert told.count(version) == 3
    license_text = (folder / "LICENSE").read_text()
    assert license_text.startswith("MIT License")
    assert license_text in sample().to_html()


@pytest.mark.parametrize("found", [sample(), sample_sweep(), sample_results()], ids=type)
def test_a_page_is_small(found):
    assert len(found.to_html().encode()) < 1_000_000


def test_a_page_without_plots_is_smaller():
    page = ForgettingReport("a", "b").to_html()
    assert len(page) < 50_000
    assert "plotly" not in page.partition("</style>")[2].partition("<script>")[0]


@pytest.mark.parametrize("make", [hostile_report, hostile_sweep, hostile_results])
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(make, name):
    page = make(name).to_html()
    page.encode()
    assert "<" not in block(page, "report") + block(page, "figures")
    assert not re.search("<(script>alert|img|!--)", page)
    check_figures(page)


@settings(max_examples=20)
@given(reports | sweeps | every_results)
def test_every_result_has_a_page(found):
    found = type(found).from_json(found.to_json())
    page = found.to_html()
    assert not re.search("<(script>alert|img|!--)", page)
    check_figures(page)


def test_figures_have_alternative_text():
    page = sample().to_html()
    labels = re.findall(r'role="img" aria-label="([^"]*)"', page)
    assert len(labels) == page.count('id="plot-')
    assert labels[0].startswith("Change in points: LAMBADA −6.3; PIQA −3.1")


def test_of_many_tests_the_worst_are_drawn():
    many = {f"test {i}": ("acc", 0.5, -0.01 * i, False, "retained", 1, 0.001) for i in range(1, 10)}
    section = sample_sweep({**many, **TARGET}).document().sections[0]
    assert [figure.title for figure in section.figures] == [f"test {i}, acc" for i in range(4, 10)]
    assert "the 6 of 9 tests that lose most" in section.about
    tests = {f"test {i}": ("acc", 0.5, -0.02 * i, False) for i in range(1, 10)}
    section = sample_results({"standard": (0.7, 1.0)}, tests=tests).document().sections[1]
    assert [figure.title for figure in section.figures] == [f"test {i}, acc" for i in range(4, 10)]
    assert "the 6 of 9 that lose most" in section.about


def test_a_missing_package_is_named(monkeypatch):
    html._template.cache_clear()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ImportError, match=r'pip install "holdfast\[eval\]"'):
        sample().to_html()
