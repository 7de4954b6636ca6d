"""The pages in a real browser."""

import time
from dataclasses import replace
from pathlib import Path

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

#: The comparison of ``make demo``.
COMPARED = Path(__file__).parents[2] / "benchmarks" / "results" / "compare_default.json"
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
            f"'#plot-{plot} .annotation-text'), e => [e.textContent, "
            "[e.getBoundingClientRect().x, e.getBoundingClientRect().y]]))"
        )
        assert places["sfa"][0] < places["lora"][0]
        assert places["lora"][1] < places["standard"][1]


#: Of each name in a plot: its text, its box, and how far it is from its mark; 0 with a line to it.
NAMES = """
Array.from(document.querySelectorAll("#plot-%d .annotation"), (group) => {
  const plot = group.closest("[id^=plot-]"), named = plot.data.find((t) => t.meta === "named");
  const { x, y, text } = plot.layout.annotations[group.dataset.index];
  const at = (k) => named.x[k] === x && named.y[k] === y && named.text[k] === text;
  const i = named.x.findIndex((_, k) => at(k));
  const r = group.querySelector(".annotation-text").getBoundingClientRect();
  const m = plot.querySelectorAll(".point")[i].getBoundingClientRect();
  const across = Math.max(m.left - r.right, r.left - m.right, 0);
  const down = Math.max(m.top - r.bottom, r.top - m.bottom, 0);
  const lines = plot.layout.shapes, drawn = plot.querySelectorAll(".shapelayer path");
  const own = lines.some((s) => s.xanchor === x && s.yanchor === y);
  const lined = own && drawn.length === lines.length;
  return [text, [r.left, r.top, r.right, r.bottom], lined ? 0 : Math.hypot(across, down)];
})
"""
MARKS = """
Array.from(document.querySelectorAll("#plot-%d .point"), (mark) => {
  const r = mark.getBoundingClientRect();
  return [r.left, r.top, r.right, r.bottom];
})
"""
MANY = {f"recipe-{i}": (0.67 + 0.01 * (i % 7), 0.1 + 0.06 * i) for i in range(30)}


def overlap(a, b):
    return min(min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1]))


@pytest.mark.parametrize("width", [1280, 800, 390])
@pytest.mark.parametrize(
    ("found", "least"),
    [(sample_results(), 11), (Results.load(COMPARED), 6), (sample_results(MANY), 20)],
    ids=["sample", "demo", "many"],
)
def test_names_stand_beside_their_marks(browser, tmp_path, found, least, width):
    assert all(opened(browser, tmp_path, found, width=width))
    for plot in range(4):
        names, marks = browser.run(NAMES % plot), browser.run(MARKS % plot)
        assert len(names) >= (least if width == 1280 else least // 2)
        for i, (text, box, far) in enumerate(names):
            assert far < 8, text
            assert not [other for other, b, _ in names[:i] if overlap(box, b) > 2], text
            assert sum(overlap(box, mark) > 2 for mark in marks) == 0, text


def test_names_follow_the_size_of_the_plot(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample_results(), width=1280))
    size = {"width": 700, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.call("Emulation.setDeviceMetricsOverride", **size)
    browser.wait("document.querySelector('#plot-0 .main-svg').clientWidth < 700")
    assert all(far < 8 for *_, far in browser.run(NAMES % 0))


def test_paper_is_light_and_unfolded(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample(), dark=True))
    ink = "getComputedStyle(document.querySelector('h1')).color"
    folded = "document.querySelectorAll('details:not([open])').length"
    widest = "Math.max(...Array.from(document.querySelectorAll('.main-svg'), e => e.clientWidth))"
    before = [browser.run(x) for x in (ink, folded, widest)]
    assert before[1] > 0
    browser.run("dispatchEvent(new Event('beforeprint'))")
    assert browser.run(ink) == "rgb(29, 29, 31)"
    assert browser.run(folded) == 0
    assert browser.run(widest) <= 680
    bar = "document.querySelector('.barlayer .point path').style.fill"
    assert browser.run(bar) == "rgb(204, 31, 45)"
    browser.run("dispatchEvent(new Event('afterprint'))")
    browser.wait(f"{widest} === {before[2]}")
    assert [browser.run(x) for x in (ink, folded)] == before[:2]
    assert browser.call("Page.printToPDF")["data"]


@pytest.fixture
def without_scripts(browser):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    yield
    browser.call("Emulation.setScriptExecutionDisabled", value=False)


@pytest.fixture
def without_inflating(browser):
    source = "delete globalThis.DecompressionStream"
    script = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    yield
    browser.call("Page.removeScriptToEvaluateOnNewDocument", **script)


@pytest.mark.parametrize("lacking", ["without_scripts", "without_inflating"])
def test_without_plots_there_is_a_sentence(browser, tmp_path, request, lacking):
    request.getfixturevalue(lacking)
    path = tmp_path / "page.html"
    sample_results().save(path)
    browser.call("Page.navigate", url=path.resolve().as_uri())
    browser.wait("location.protocol === 'file:' && document.readyState === 'complete'")
    shown = "Array.from(document.querySelectorAll('.undrawable'), e => e.checkVisibility())"
    browser.wait(f"{shown}.length === 3 && {shown}.every(Boolean)")
    assert browser.run("document.querySelector('.plots').checkVisibility()") is False
    assert browser.run("document.querySelector('tbody').checkVisibility()") is True
