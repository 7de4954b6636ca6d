"""Which recipe is recommended, and what is said about it."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comparison.results import Results
from holdfast.report.recommend import CLOSE, NEAR, recommend
from report.sample_results import every_results, sample_results, simple

targets = st.lists(st.floats(0.5, 3), min_size=1, max_size=3)
figures = st.dictionaries(
    st.sampled_from(["standard", "flow", "recadam", "ewc", "lora"]),
    st.tuples(targets, st.floats(5, 20)),
    min_size=1,
)


def test_close_to_the_best_it_forgets_least():
    said = recommend(
        simple(
            {
                "standard": ([0.706], 13.8),
                "flow": ([0.699], 12.1),
                "recadam+flow": ([0.703], 10.4),
                "wise-ft": ([0.720], 10.1),
            },
            1.396,
        )
    )
    assert said.headline == (
        "Take recadam+flow: of the 2 recipes close to the best on new, it forgets least."
    )
    assert said.sentences[:5] == (
        "recadam+flow: 0.703 nll on new, lost 4.0 % on average.",
        "The best, flow: 0.699 nll on new, lost 21.0 % on average.",
        "To forget less, take wise-ft: 0.720 nll on new, lost 1.00 % on average.",
        "Standard fine-tuning: 0.706 nll on new, lost 38.0 % on average.",
        "The pretrained model: 1.396.",
    )
    assert (said.label, said.best, said.gentle) == ("recadam+flow", "flow", "wise-ft")
    assert str(said).startswith(said.headline)


@pytest.mark.parametrize(
    ("found", "label", "words"),
    [
        ({"flow": ([1.0], 12.0)}, "flow", "the only recipe"),
        ({"flow": ([1.0], 12.0), "ewc": ([1.5], 10.0)}, "flow", "no other recipe comes close"),
        ({"flow": ([1.0], 11.0), "ewc": ([1.0], 12.0)}, "flow", "of the 2 recipes close"),
        ({"flow": ([1.0, 1.4], 12.0), "ewc": ([1.3, 1.5], 11.0)}, "ewc", "of the 2 recipes close"),
        ({"flow": ([2.5], 10.0)}, None, "Keep the pretrained model"),
        ({"flow": ([math.nan], 10.0)}, None, "Keep the pretrained model"),
        ({"flow": ([math.nan], 10.0), "ewc": ([1.0], 12.0)}, "ewc", "no other recipe"),
        ({}, None, "No run has finished"),
    ],
    ids=str,
)
def test_what_the_headline_says(found, label, words):
    said = recommend(simple(found))
    assert said.label == label
    assert words in said.headline


def test_where_more_is_better():
    found = {"flow": ([0.70], 12.0), "ewc": ([0.695], 10.0), "lora": ([0.60], 10.0)}
    assert recommend(simple(found, 0.2, lower=False)).label == "ewc"


def test_of_equally_good_ones_the_order_does_not_matter():
    found = {"flow": ([1.0], 15.0), "ewc": ([0.8, 1.0, 1.5], 14.0), "lora": ([1.4], 11.0)}
    assert recommend(simple(found)).label == "lora"
    assert recommend(simple(dict(reversed(found.items())))).label == "lora"


def test_without_retained_tests_the_predictions_count():
    found = simple({"flow": ([1.0], None), "ewc": ([1.001], None)})
    assert recommend(found).label == "flow"
    moved = (replace(run, kl={"new": 1.0 if run.recipe == "flow" else 0.5}) for run in found.runs)
    said = recommend(Results(tuple(moved)))
    assert said.label == "ewc"
    assert "it moves the predictions least" in said.headline
    assert "To see what was forgotten, test tasks" in str(said)


@pytest.mark.parametrize(("before", "gentle"), [(4.0, "wise-ft"), (2.4, "flow")])
def test_to_forget_less_costs_at_most_a_tenth_of_the_gain(before, gentle):
    found = {"flow": ([2.0], 40.0), "wise-ft": ([2.15], 12.0), "sfa": ([2.3], 11.0)}
    said = recommend(simple(found, before))
    assert (said.label, said.gentle) == ("flow", gentle)


def test_failures_and_seeds_are_mentioned():
    found = sample_results(seeds=(0,), failed={"mas-0-1": "RuntimeError: no"})
    assert "1 of 12 runs failed." in recommend(found).sentences
    assert "Only one seed was run: small differences may be chance." in recommend(found).sentences


@given(figures)
def test_the_rule(found):
    results = simple(found)
    said = recommend(results)
    known = {s.label: s for s in results.summaries()}
    better = [s for s in known.values() if s.target.gain > 0]
    if not better:
        assert said.label is None
        return
    chosen, best = known[said.label], known[said.best]
    top = best.target.after
    assert top == min(s.target.after for s in better)
    reach = max(run.target.after for run in best.runs)
    for s in better:
        near = s.target.after - top <= CLOSE * top
        overlaps = min(run.target.after for run in s.runs) <= reach - 1e-9
        if near or overlaps:
            assert chosen.loss <= s.loss
        if s.target.gain >= NEAR * best.target.gain:
            assert known[said.gentle].loss <= s.loss
    assert not any(
        s.target.after < chosen.target.after and s.loss <= chosen.loss and s.seeds == 1
        for s in better
        if s.target.after - top <= CLOSE * top
    )


@given(figures, st.randoms())
def test_names_failures_and_order_do_not_matter(found, random):
    results = simple(found)
    said = recommend(results)
    assert recommend(replace(results, failed={"x": "y"})).label == said.label
    other = simple({f"my {name}": row for name, row in found.items()})  # no standard among them
    label = recommend(other).label
    assert label == (said.label and f"my {said.label}")
    apart = {name: (some, 11.0 + i) for i, (name, (some, _)) in enumerate(found.items())}
    runs = list(simple(apart).runs)
    label = recommend(Results(tuple(runs))).label
    random.shuffle(runs)
    assert recommend(Results(tuple(runs))).label == label


NAMES = ["standard", "holdfast", "recadam", "ewc", "lora"]


@given(figures, st.permutations(NAMES), st.booleans())
def test_the_figures_are_recommended_whatever_their_names(found, names, tested):
    """With and without retained tests, if the names of the recipes are exchanged."""
    first = simple({name: (some, kept if tested else None) for name, (some, kept) in found.items()})
    kls = {name: kept for name, (_, kept) in found.items()}
    first = replace(first, runs=tuple(replace(r, kl={"new": kls[r.recipe]}) for r in first.runs))
    other = dict(zip(found, names, strict=False))
    second = replace(first, runs=tuple(replace(r, recipe=other[r.recipe]) for r in first.runs))
    for one, two in zip(_labels(recommend(first)), _labels(recommend(second)), strict=True):
        assert two == (one and other[one])


def _labels(said):
    return said.label, said.best, said.gentle


@given(every_results)
def test_there_is_always_something_to_say(found):
    said = recommend(found)
    labels = {run.label for run in found.runs}
    assert {said.label, said.best, said.gentle} <= labels | {None}
    assert all(s and s.isprintable() for s in (said.headline, *said.sentences))


def moved(signals):
    """Without retained tests, of two close recipes one moves less on texts of the base."""
    kls = {
        "flow": {"context-free": 0.1, "new": 0.9},
        "ewc": {"context-free": 0.5, "new": 0.2},
    }
    found = simple({"flow": ([1.0], None), "ewc": ([1.001], None)})
    return replace(
        found,
        runs=tuple(
            replace(run, kl=kls[run.recipe], trained_on=signals.get(run.recipe, ()))
            for run in found.runs
        ),
    )


@pytest.mark.parametrize("who", ["flow", "ewc"])
def test_a_training_signal_recommends_nothing(who):
    assert recommend(moved({})).label == "flow"
    said = recommend(moved({who: ("context-free",)}))
    assert said.label == "ewc"
    assert "moves the predictions least" in said.headline
    said = recommend(moved({who: ("context-free", "new")}))
    assert said.headline == "Take flow: of the 2 recipes close to the best on new, it is the best."


def test_a_training_signal_is_marked_and_gets_no_star():
    text = moved({"flow": ("context-free",)}).to_markdown()
    (row,) = (line for line in text.splitlines() if line.startswith("| flow"))
    assert "0.100†" in row
    assert "0.100†\\*" not in row
    assert "† The KL was a training signal of this recipe: it is no evidence of retention." in text
