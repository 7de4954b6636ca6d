"""The frontier: views, label placement, what no other model beats."""

from hypothesis import given
from hypothesis import strategies as st

from holdfast.report.frontier import Axis, Mark, frontier, out_of_view, pareto
from holdfast.report.plot import ACCENT, GAINED
from holdfast.report.words import Span

pairs = st.lists(st.tuples(st.floats(0, 300), st.floats(0, 200)), max_size=15)


def points(count):
    return [Mark(f"model {i}", ACCENT, ()) for i in range(count)]


@given(pairs)
def test_the_frontier_is_what_none_beats(found):
    best = pareto(found)
    assert [found[i] for i in best] == sorted(found[i] for i in best)
    for i, (x, y) in enumerate(found):
        beaten = any(a >= x and b >= y and (a, b) != (x, y) for a, b in found)
        assert (i in best) <= (not beaten)
        assert beaten or (x, y) in [found[k] for k in best]


def test_a_far_worse_model_does_not_squeeze_the_rest():
    x = Axis("x", [Span(1.0 + 0.1 * i) for i in range(6)], lower_is_better=True)
    y = Axis("y", [*(Span(5.0 + i) for i in range(5)), Span(-500.0)], 0.0, False)
    assert out_of_view(points(6), x, y) == ["model 5"]
    assert len(frontier(points(6), x, y).plot["data"][1]["x"]) == 5
    nan = Axis("y", [*(Span(5.0 + i) for i in range(5)), Span(float("nan"))], 0.0, False)
    assert out_of_view(points(6), x, nan) == ["model 5"]


def test_the_line_joins_the_best_or_all():
    x = Axis("x", [Span(1.0), Span(2.0), Span(1.5)], lower_is_better=False)
    y = Axis("y", [Span(5.0), Span(4.0), Span(3.0)], lower_is_better=False)
    assert frontier(points(3), x, y).plot["data"][0]["x"] == [1.0, 2.0]
    assert frontier(points(3), x, y, path=True).plot["data"][0]["x"] == [1.0, 2.0, 1.5]


def test_the_recommended_model_is_drawn_last():
    x = Axis("x", [Span(1.0), Span(2.0)], lower_is_better=False)
    drawn = frontier([Mark("chosen", GAINED, ()), Mark("other", ACCENT, ())], x, x)
    assert drawn.plot["data"][1]["text"][-1] == "<b>chosen</b>"
