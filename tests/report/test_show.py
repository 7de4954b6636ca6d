"""A comparison's table, plots and page."""

import io
import itertools
import json
import re
import sys
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from browser import opened
from holdfast.comparison.results import Results
from holdfast.report import comparison_frontier as frontier
from holdfast.report import comparison_training as training
from holdfast.report.comparison_columns import change_table, main_table
from holdfast.report.comparison_page import to_html
from holdfast.report.comparison_table import to_text
from holdfast.report.point_labels import placed, spread
from report.reports import HOSTILE
from report.sample_results import RECIPES, TESTS, every_results, run, sample_results, simple

LONG = {f"{name}+wise-ft+and-more": row for name, row in RECIPES.items()}


@pytest.mark.parametrize("recipes", [RECIPES, LONG], ids=["short", "long"])
def test_the_table_fits_a_terminal(recipes):
    found = sample_results(recipes)
    for line in to_text(found).splitlines():
        assert len(line) <= 100
    table = main_table(found, 100)
    assert table.head[1:5] == ("GSM8K ", "WikiText-2 ", "PIQA ", "LAMBADA ")
    assert sum(row[0].endswith(" ★") for row in table.rows) == 1


def test_the_best_of_each_column_is_marked():
    rows = {row[0]: row for row in main_table(sample_results(), 120).rows}
    assert [name for name, row in rows.items() if row[1].endswith("*")] == ["lora ★"]
    assert [name for name, row in rows.items() if row[2].endswith("*")] == ["sfa"]
    assert rows["pretrained"][1:5] == ("1.396 ", "21.3 ", "68.4 % ", "42.9 % ")
    assert rows["standard"][1].startswith("0.70")


def test_of_many_tests_some_are_left_out():
    tests = {f"test {i}": ("acc", 0.5, -0.01, False) for i in range(12)}
    found = sample_results(tests=tests)
    table = main_table(found, 100)
    assert "Columns left out: " in table.note
    assert max(map(len, to_text(found).splitlines())) <= 100
    assert len(main_table(found).head) == 18


def test_the_papers_tables():
    found = sample_results().summaries()
    table = change_table(found, found[0])
    assert table.title == "Change from standard"
    assert table.rows[0][1:] == ("0 (0)", "0 % (0 %)", "0 (0)", "0 (0)")
    two = simple({"standard": ([1.0, 1.2], 20.0), "flow": ([0.9, 1.5], 10.0)}).summaries()
    assert change_table(two).rows[1][1] == "−0.800 (−1.100)"
    assert change_table(two, two[0]).rows[1][1:] == ("+0.100 (−0.100)", "−50.0 % (−50.0 %)")
    one = simple({"flow": ([1.0], 20.0)}).summaries()
    assert change_table(one).rows == (("flow", "−1.000", "+100 %"),)


def test_with_rich_and_without(monkeypatch, capsys):
    found = sample_results(failed={"mas-0-1": "RuntimeError: [red]no[/red]"})
    console = Console(file=io.StringIO(), width=100)
    found.to_terminal(console)
    text = console.file.getvalue()
    assert "Take lora" in text
    assert "[red]no[/red]" in text
    assert "…" not in text
    monkeypatch.setitem(sys.modules, "rich", None)
    found.to_terminal()
    assert "Take lora" in capsys.readouterr().out


def test_markdown(tmp_path):
    found = sample_results({"a|b": (0.7, 0.1), "standard": (0.7, 1.0)})
    found.save(tmp_path / "report.md")
    text = (tmp_path / "report.md").read_text()
    assert text.startswith("# Take a\\|b: ")
    assert "| a\\|b ★ | 0.7" in text


@settings(max_examples=40)
@given(every_results)
def test_every_comparison_is_shown(found):
    found = Results.from_json(found.to_json())
    found.to_markdown().encode()
    to_text(found).encode()
    found.to_terminal(Console(file=io.StringIO(), width=80))
    summaries = found.summaries()
    plots = training.curve_plots(summaries, "flow") + training.cost_plots(summaries, "flow")
    if summaries:
        plots += [frontier.frontier_plot(summaries, "flow")]
        plots += frontier.test_plots(summaries, "flow")
    for plot in plots:
        text = json.dumps(plot.figure, allow_nan=False)
        figure = json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#000000", text))
        go.Figure(figure.pop("narrow", None))
        go.Figure(figure)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "plotly")
        page = to_html(found)
    assert not re.search("<(script>alert|img|!--)", page)


points = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 200)), max_size=15)


@given(points)
def test_names_stand_beside_their_points(found):
    names = [f"name {i}" for i in range(len(found))]
    places = placed(names, found, 300, 200)
    assert len(places) == len(found)
    if len(found) == 1 and 30 < found[0][1] < 170:
        assert places[0] is not None


@given(st.lists(st.floats(0, 100), max_size=6))
def test_names_of_lines_stand_apart(heights):
    found = spread(heights, 15, 100)
    assert all(place <= 100 for place in found)
    apart = sorted(found)
    assert all(b - a > 15 - 1e-6 for a, b in itertools.pairwise(apart))


@given(points)
def test_the_frontier_is_what_none_beats(found):
    best = frontier.pareto(found)
    assert [found[i] for i in best] == sorted(found[i] for i in best)
    for i, (x, y) in enumerate(found):
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in found)
        assert (i in best) <= (not beaten)
        assert beaten or (x, y) in [found[k] for k in best]


def test_what_is_far_off_does_not_squeeze_the_rest():
    found = sample_results({**RECIPES, "broken": (0.7, 500.0)}).summaries()
    trace = frontier.frontier_plot(found, None).figure["data"][2]
    assert len(trace["x"]) == len(RECIPES)
    assert frontier.out_of_view(found) == ["broken"]


def test_of_many_tests_the_worst_are_drawn():
    tests = {f"test {i}": ("acc", 0.5, -0.02 * i, False) for i in range(1, 10)}
    found = sample_results({"standard": (0.7, 1.0)}, tests=tests)
    titles = [plot.title for plot in frontier.test_plots(found.summaries(), None)]
    assert titles == [f"test {i}, acc" for i in range(4, 10)]
    assert "the 6 of 9 that lose most" in found.to_html()


@pytest.mark.parametrize(
    ("found", "plots"),
    [
        (sample_results(), 8),
        (sample_results(seeds=(0,), tests={}), 4),
        (sample_results({"flow": (0.7, 0.4)}, tests={"PIQA": TESTS["PIQA"]}), 5),
        (sample_results({"flow": (float("nan"), 0.4)}), 8),
        (Results((), failed={"a-0-1": "MemoryError"}), 0),
    ],
    ids=["many", "no tests", "one", "not finite", "none"],
)
def test_the_page_draws_everything(browser, tmp_path, found, plots):
    assert opened(browser, tmp_path, found, dark=True) == [True] * plots
    headline = browser.run("document.querySelector('h1').textContent")
    assert headline == found.recommendation().headline


def labels(browser):
    return set(
        browser.run(
            "Array.from(document.querySelectorAll('#plot-0 .textpoint text'), e => e.textContent)"
        )
    )


def test_better_is_up_and_to_the_right(browser, tmp_path):
    assert all(opened(browser, tmp_path, sample_results()))
    assert {"standard", "lora", "sfa"} <= labels(browser)
    for plot in (0, 1, 2):  # lower is better in one and higher in others
        places = browser.run(
            "Object.fromEntries(Array.from(document.querySelectorAll("
            f"'#plot-{plot} .textpoint text'), e => [e.textContent, "
            "[e.getBoundingClientRect().x, e.getBoundingClientRect().y]]))"
        )
        assert places["sfa"][0] < places["lora"][0]
        assert places["lora"][1] < places["standard"][1]


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_it_fits_the_screen(browser, tmp_path, width):
    assert all(opened(browser, tmp_path, sample_results(LONG), width=width))
    assert browser.run("document.documentElement.scrollWidth") == width


@pytest.mark.parametrize("width", [1280, 390])
def test_names_do_not_stand_on_each_other(browser, tmp_path, width):
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


@pytest.mark.parametrize("name", [n for n in HOSTILE if "<" in n])
def test_names_do_nothing_in_a_browser(browser, tmp_path, name):
    tests = {f"{name}{i}": test for i, test in enumerate(TESTS.values())}
    runs = tuple(run(f"{name}{i}", 0, 0.7, 0.1 * i, tests) for i in range(3))
    found = Results(runs, failed={name: name}, plan={"model": name, "data": name, name: name})
    found = replace(found, runs=tuple(replace(one, versions={name: name}) for one in runs))
    assert all(opened(browser, tmp_path, found))
    assert browser.run("document.querySelectorAll('img, script:not([type])').length") == 2
