"""A sweep's plots and its page."""

import json
import re
from dataclasses import replace

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from browser import opened
from holdfast.evaluate.sweep import Sweep, SweepPoint
from holdfast.report import sweep_frontier as frontier
from holdfast.report import sweep_page
from report.reports import HOSTILE, names, reports
from report.sample_sweep import RETAINED, TARGET, TESTS, sample_sweep

sweeps = st.lists(st.tuples(st.floats(0, 1), reports), min_size=1, max_size=3).flatmap(
    lambda found: st.builds(
        Sweep,
        names,
        names,
        st.just(tuple(SweepPoint(a, dict(found)[a]) for a in sorted(dict(found)))),
    )
)


@settings(max_examples=40)
@given(sweeps)
def test_every_sweep_is_shown(found):
    found = Sweep.from_json(found.to_json())
    found.to_markdown().encode()
    plots = frontier.frontier_plots(found, 0.5) + frontier.distance_plots(found, 0.5)
    for plot in plots:
        text = json.dumps(plot.figure, allow_nan=False)
        go.Figure(json.loads(re.sub(r"var\(--[a-z0-9-]+\)", "#000000", text)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plotly.offline.get_plotlyjs", lambda: "plotly")
        page = sweep_page.to_html(found)
    assert not re.search("<(script>alert|img|!--)", page)


def test_of_many_tests_the_worst_are_drawn():
    many = {f"test {i}": ("acc", 0.5, -0.01 * i, False, "retained", 1, 0.001) for i in range(1, 10)}
    found = sample_sweep({**many, **TARGET})
    titles = [plot.title for plot in frontier.frontier_plots(found, 0.5)]
    assert titles == [f"test {i}, acc" for i in range(4, 10)]
    assert "the 6 of 9 tests that lose most" in found.to_html()


@pytest.mark.parametrize(
    ("tests", "plots"), [(TESTS, 7), (RETAINED, 7), (TARGET, 4), ({}, 3)], ids=str
)
def test_the_page_draws_the_frontier(browser, tmp_path, tests, plots):
    assert opened(browser, tmp_path, sample_sweep(tests), dark=True) == [True] * plots
    labels = browser.run(
        "Array.from(document.querySelectorAll('#plot-0 .textpoint text'), e => e.textContent)"
    )
    if tests is TESTS:
        assert labels == ["base", "0.25", "0.5", "0.75", "tuned"]
    assert browser.run("document.querySelector('h1').textContent").startswith(
        "Take α = 0.75" if "GSM8K" in tests else "No α is recommended"
    )


@pytest.mark.parametrize("width", [1280, 390, 320])
def test_it_fits_the_screen(browser, tmp_path, width):
    assert all(opened(browser, tmp_path, sample_sweep(), width=width))
    assert browser.run("document.documentElement.scrollWidth") == width


def test_better_is_up_and_to_the_right(browser, tmp_path):
    """The base is the first point and the tuned model the last one, in both plots."""
    opened(browser, tmp_path, sample_sweep())
    for plot in (0, 1):  # lower is better in one and higher in the other
        places = browser.run(
            f"Array.from(document.querySelectorAll('#plot-{plot} .points path'), e => "
            "[e.getBoundingClientRect().x, e.getBoundingClientRect().y])"
        )
        assert places[0][0] < places[-1][0]
        assert places[0][1] < places[-1][1]


@pytest.mark.parametrize("name", [n for n in HOSTILE if "<" in n])
def test_names_do_nothing_in_a_browser(browser, tmp_path, name):
    tests = {f"{name}{i}": test for i, test in enumerate(TESTS.values())}
    found = replace(sample_sweep(tests), base=name, tuned=name)
    assert all(opened(browser, tmp_path, found))
    assert browser.run("document.querySelectorAll('img, script:not([type])').length") == 2
