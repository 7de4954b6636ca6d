import base64
import hashlib
import json
import re
import sys
import time
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings

from holdfast.evaluate.report import Curve, Divergence, Estimate, ForgettingReport
from holdfast.report import report_figures as _figures
from holdfast.report import report_page as html
from holdfast.report import score_figures as _score_figures
from report.reports import HOSTILE, reports
from report.sample_report import drift, estimate, sample


@pytest.fixture
def no_plotly(monkeypatch):
    """A page without the 4.8 MB, where nothing is run."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "plotly")


def block(page, name):
    return re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.S)[1]


def hostile(name):
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


@pytest.mark.usefixtures("no_plotly")
def test_the_report_is_in_its_page():
    page = html.to_html(sample())
    assert ForgettingReport.from_json(block(page, "report")) == sample()
    assert "<h1>Lost 6.3 points on LAMBADA" in page
    assert "http:" not in page
    assert "https:" not in page


@pytest.mark.usefixtures("no_plotly")
def test_only_its_own_scripts_may_run():
    page = html.to_html(sample())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)[1]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(scripts) == 2
    for script in scripts:
        hashed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{hashed}'" in policy
    assert policy.startswith("default-src 'none';")
    assert "unsafe-inline" not in policy.partition("style-src")[0]


@pytest.mark.usefixtures("no_plotly")
@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text(name):
    page = html.to_html(hostile(name))
    page.encode()
    report, figures = block(page, "report"), block(page, "figures")
    assert "<" not in report + figures
    assert json.loads(report)["notes"] == [name.encode("utf-8", "backslashreplace").decode()]
    assert not re.search("<(script>alert|img|!--)", page)
    for text in re.findall(r"<[^<>]*", "".join(_texts(json.loads(figures)))):
        assert re.match(r"</?(b|br|extra)>", text + ">"), text


def _texts(value):
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif isinstance(value, str):
        yield value


@settings(max_examples=30)
@given(reports)
def test_every_report_has_a_page_and_figures_that_plotly_knows(report):
    report = ForgettingReport.from_json(report.to_json())
    plots = [plot for pair in _score_figures.score_plots(report.scores) for plot in pair]
    plots += [_figures.curve_plot(curve) for curve in report.curves]
    plots += [_figures.divergence_plot(report.divergences)] if report.divergences else []
    plots += [_figures.drift_plot(report.drift)] if report.drift and report.drift.layers else []
    for plot in plots:
        json.dumps(plot.figure, allow_nan=False)
        plain = json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#000000", json.dumps(plot.figure)))
        go.Figure(plain)  # raises for an unknown attribute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "plotly")
        html.to_html(report)


def test_without_plotly_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(ImportError, match=r'pip install "holdfast\[eval\]"'):
        sample().to_html()


def opened(browser, tmp_path, report, **options):
    path = tmp_path / "report.html"
    report.save(path)
    browser.events.clear()
    browser.show(path, **options)
    return path


def drawn(browser):
    """Each place of a plot, and whether there is one."""
    return browser.run(
        "Array.from(document.querySelectorAll('[id^=plot-]'), e => !!e.querySelector('.main-svg'))"
    )


def check_quiet(browser, path):
    assert browser.complaints() == []
    assert {u for u in browser.requests() if not u.startswith("data:")} == {path.resolve().as_uri()}


def test_the_page_draws_its_plots_and_loads_nothing(browser, tmp_path):
    path = opened(browser, tmp_path, sample())
    assert drawn(browser) == [True] * 10
    assert browser.run("document.querySelector('h1').textContent").startswith("Lost 6.3 points")
    assert browser.run("document.querySelectorAll('.heatmaplayer image').length") == 1
    check_quiet(browser, path)


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_it_fits_the_screen(browser, tmp_path, width):
    opened(browser, tmp_path, sample(), width=width)
    browser.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.run("document.documentElement.scrollWidth") == width
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        width=500,
        height=900,
        deviceScaleFactor=1,
        mobile=False,
    )
    plots = "Array.from(document.querySelectorAll('.main-svg'))"
    browser.wait(f"{plots}.every(plot => plot.clientWidth <= plot.closest('.card').clientWidth)")


def test_plots_follow_the_theme(browser, tmp_path):
    path = opened(browser, tmp_path, sample(), dark=True)
    line = "document.querySelector('.barlayer .point path').style.fill"
    page = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(line), browser.run(page)
    browser.run("document.getElementById('theme').click()")
    light = browser.run(line), browser.run(page)
    assert dark == ("rgb(255, 107, 102)", "rgb(11, 11, 12)")
    assert light == ("rgb(204, 31, 45)", "rgb(245, 245, 247)")
    check_quiet(browser, path)


def test_the_download_is_the_report(browser, tmp_path):
    opened(browser, tmp_path, sample())
    folder = tmp_path / "downloads"
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.run("document.getElementById('download').click()")
    path, until = folder / "forgetting-report.json", time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert ForgettingReport.load(path) == sample()


@pytest.mark.parametrize("name", [n for n in HOSTILE if "<" in n])
def test_names_do_nothing_in_a_browser(browser, tmp_path, name):
    path = opened(browser, tmp_path, hostile(name))
    check_quiet(browser, path)
    assert all(drawn(browser))
    assert browser.run("document.querySelectorAll('img, script:not([type])').length") == 2
    assert not [e for e in browser.events if e.get("method") == "Page.javascriptDialogOpening"]
    shown = browser.run("document.querySelector('.models').textContent")
    assert shown == f"{name} → {name}"


def test_odd_reports_are_drawn(browser, tmp_path):
    """Nothing at all; figures that are not finite; drift without layers' kinds."""
    odd = Estimate(float("nan"), float("inf"), None, 0)
    broken = replace(sample().scores[0], before=odd, after=odd, change=odd)
    moved = replace(drift(3), tensors=(), kinds=())
    for report in (
        ForgettingReport("a", "a"),
        ForgettingReport(
            "a", "b", scores=(broken,), divergences=(Divergence("x", odd, 0, "", ""),)
        ),
        ForgettingReport("a", "b", drift=moved),
    ):
        path = opened(browser, tmp_path, report)
        assert all(drawn(browser))
        check_quiet(browser, path)
