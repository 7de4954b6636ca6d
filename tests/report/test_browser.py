"""The pages in a real browser."""

import time
from dataclasses import replace

import pytest

from browser import opened
from holdfast.comparison.results import Results
from holdfast.evaluate.report import Divergence, Estimate, ForgettingReport
from report.reports import HOSTILE
from report.sample_report import drift, sample
from report.sample_results import RECIPES, TESTS, sample_results
from report.sample_sweep import RETAINED, TARGET, sample_sweep
from report.test_html import hostile_report, hostile_results, hostile_sweep

pytestmark = pytest.mark.soak

LONG = {f"{name}+wise-ft+and-more": row for name, row in RECIPES.items()}
ODD = Estimate(float("nan"), float("inf"), None, 0)
BROKEN = replace(sample().scores[0], before=ODD, after=ODD, change=ODD)
PAGES = {
    "report": (sample(), 6),
    "nothing": (ForgettingReport("a", "a"), 0),
    "not finite": (
        ForgettingReport(
            "a", "b", scores=(BROKEN,), divergences=(Divergence("x", ODD, 0, "", ""),)
        ),
        1,
    ),
    "drift without kinds": (
        ForgettingReport("a", "b", drift=replace(drift(3), tensors=(), kinds=())),
        1,
    ),
    "sweep": (sample_sweep(), 7),
    "sweep without target": (sample_sweep(RETAINED), 7),
    "sweep without retained": (sample_sweep(TARGET), 4),
    "sweep without scores": (sample_sweep({}), 3),
    "results": (sample_results(), 6),
    "no tests": (sample_results(seeds=(0,), tests={}), 2),
    "one recipe": (sample_results({"flow": (0.7, 0.4)}, tests={"PIQA": TESTS["PIQA"]}), 3),
    "recipe not finite": (sample_results({"flow": (float("nan"), 0.4)}), 6),
    "no runs": (Results((), failed={"a-0-1": "MemoryError"}), 0),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_plot_is_drawn(browser, tmp_path, name):
    found, plots = PAGES[name]
    assert opened(browser, tmp_path, found, dark=True) == [True] * plots
    headline = browser.run("document.querySelector('h1').textContent")
    assert headline == found.document().answer.headline


@pytest.mark.parametrize("width", [1280, 390, 320])
@pytest.mark.parametrize(
    "found", [sample(), sample_sweep(), sample_results(LONG)], ids=["report", "sweep", "results"]
)
def test_it_fits_the_screen(browser, tmp_path, found, width):
    assert all(opened(browser, tmp_path, found, width=width))
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
    assert all(opened(browser, tmp_path, sample(), dark=True))
    line = "document.querySelector('.barlayer .point path').style.fill"
    page = "getComputedStyle(document.body).backgroundColor"
    dark = browser.run(line), browser.run(page)
    browser.run("document.getElementById('theme').click()")
    light = browser.run(line), browser.run(page)
    assert dark == ("rgb(255, 107, 102)", "rgb(11, 11, 12)")
    assert light == ("rgb(204, 31, 45)", "rgb(245, 245, 247)")


def test_the_download_is_the_report(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample()))
    folder = tmp_path / "downloads"
    browser.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    browser.run("document.getElementById('download').click()")
    path, until = folder / "forgetting-report.json", time.monotonic() + 30
    while not path.exists() and time.monotonic() < until:
        time.sleep(0.05)
    assert ForgettingReport.load(path) == sample()


def test_tables_sort_by_a_click(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample()))
    change = "document.querySelectorAll('th')[4]"
    cells = "Array.from(document.querySelectorAll('tbody')[0].rows, r => r.cells[0].textContent)"
    browser.run(f"{change}.click()")
    up = browser.run(cells)
    assert up == ["LAMBADA", "PIQA", "GSM8K (target)", "ARC-easy", "WikiText-2"]
    browser.run(f"{change}.click()")
    assert browser.run(cells) == up[::-1]


@pytest.mark.parametrize("make", [hostile_report, hostile_sweep, hostile_results])
@pytest.mark.parametrize("name", [n for n in HOSTILE if "<" in n])
def test_names_do_nothing(browser, tmp_path, make, name):
    assert all(opened(browser, tmp_path, make(name)))
    assert browser.run("document.querySelectorAll('img, script:not([type])').length") == 2
    assert not [e for e in browser.events if e.get("method") == "Page.javascriptDialogOpening"]
    assert browser.run("document.querySelector('.models').textContent") == f"{name} → {name}"


def test_better_is_up_and_to_the_right(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample_results()))
    for plot in (0, 1, 2):  # lower is better in one and higher in others
        places = browser.run(
            "Object.fromEntries(Array.from(document.querySelectorAll("
            f"'#plot-{plot} .textpoint text'), e => [e.textContent, "
            "[e.getBoundingClientRect().x, e.getBoundingClientRect().y]]))"
        )
        assert places["sfa"][0] < places["lora"][0]
        assert places["lora"][1] < places["standard"][1]


@pytest.mark.parametrize("width", [1280, 390])
def test_names_stand_apart(browser, tmp_path, width):
    assert all(opened(browser, tmp_path, sample_results(), width=width))
    boxes = browser.run(
        "Array.from(document.querySelectorAll('#plot-0 .textpoint text'), e => "
        "{const r = e.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]})"
    )
    boxes = [box for box in boxes if box[2] > box[0]]
    assert len(boxes) > 5
    for i, a in enumerate(boxes):
        for b in boxes[:i]:
            across, down = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
            assert across < 3 or down < 5
