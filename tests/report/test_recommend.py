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


FIGURES = {
    "standard": ([0.706], 13.8),
    "flow": ([0.699], 12.1),
    "recadam+flow": ([0.703], 10.4),
    "wise-ft": ([0.720], 10.1),
    "sfa": ([1.3], 10.0),
}


def test_three_choices_of_the_frontier():
    said = recommend(simple(FIGURES, 1.396))
    assert said.headline == (
        "Take recadam+flow: of standard fine-tuning and the 2 recipes that do as well on new "
        "(within 1 %), it forgets least."
    )
    assert said.sentences == (
        "recadam+flow forgets least at the target of standard fine-tuning: perplexity 2.02 on new "
        "(0.703 nats per token). It reads its old texts about as well as before: perplexity +4.0 % "
        "on old (+0.039 nats per token).",
        "wise-ft is balanced (forgets least with 90 % of the best gain): perplexity 2.054 on new "
        "(0.720 nats per token). It reads its old texts about as well as before: perplexity +1.0 % "
        "on old (+0.010 nats per token).",
        "flow has the best target: perplexity 2.012 on new (0.699 nats per token). It reads its "
        "old texts worse than before: perplexity +21.0 % on old (+0.191 nats per token).",
        "Standard fine-tuning: perplexity 2.026 on new (0.706 nats per token). It reads its old "
        "texts much worse than before: perplexity +38.0 % on old (+0.322 nats per token).",
        "The pretrained model: perplexity 4.039 on new (1.396 nats per token).",
        "Only one seed was run: small differences may be chance.",
        "The choice was made on these samples: confirm it on others.",
    )
    assert said.label == said.at_standard == "recadam+flow"
    assert (said.balanced, said.best) == ("wise-ft", "flow")
    assert str(said).startswith(said.headline)


def test_a_recipe_that_is_two_choices_is_named_once():
    found = {"standard": ([1.0], 15.0), "ewc": ([0.9], 11.0), "lora": ([1.0], 11.5)}
    said = recommend(simple(found))
    assert {said.label, said.at_standard, said.balanced, said.best} == {"ewc"}
    assert said.sentences[0].startswith(
        "ewc forgets least at the target of standard fine-tuning, is balanced (forgets least with "
        "90 % of the best gain) and has the best target: perplexity 2.46 on new"
    )
    assert str(said).count("ewc") == 2  # once in the headline


def test_the_best_takes_the_place_of_standard():
    others = {name: row for name, row in FIGURES.items() if name != "standard"}
    said = recommend(simple(others, 1.396))
    assert said.headline == (
        "Take recadam+flow: of the 2 recipes close to the best (within 1 %) on new, it forgets "
        "least."
    )
    assert "recadam+flow forgets least close to the best: " in str(said)
    assert "Standard fine-tuning has no result: recipes are compared with the best." in str(said)
    worse = recommend(simple({**others, "standard": ([2.0], 10.0)}, 1.396))
    assert worse.label == "recadam+flow"
    assert "Standard fine-tuning did not improve the target: recipes are" in str(worse)


def test_a_much_gentler_recipe_is_taken_at_the_target_of_standard():
    """Not the best one, which forgets nearly as much as standard fine-tuning."""
    found = {"standard": ([2.32], 250.0), "flow": ([2.16], 46.0), "lora": ([2.33], 13.8)}
    said = recommend(simple(found, 4.58))
    assert (said.label, said.best) == ("lora", "flow")
    assert "perplexity 4.6-fold on old (+1.526 nats per token)" in str(said)


def test_a_choice_made_on_other_data_is_taken():
    said = recommend(replace(simple(FIGURES, 1.396), taken="sfa"))
    assert said.headline.startswith("Take sfa: on the data for choosing, it did as well as")
    assert said.sentences[0].startswith("sfa: perplexity")
    assert (said.label, said.at_standard) == ("sfa", "recadam+flow")
    assert "confirm" not in str(said)


@pytest.mark.parametrize(
    ("found", "label", "words"),
    [
        ({"flow": ([1.0], 12.0)}, "flow", "the only recipe"),
        ({"flow": ([1.0], 12.0), "ewc": ([1.5], 10.0)}, "flow", "no other recipe comes close"),
        ({"flow": ([1.0], 11.0), "ewc": ([1.0], 12.0)}, "flow", "of the 2 recipes close"),
        ({"flow": ([1.0, 1.4], 12.0), "ewc": ([1.2, 1.3], 11.0)}, "ewc", "of the 2 recipes close"),
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


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            {"standard": ([1.0], 15.0), "wise-ft": ([1.001], 11.0), "lora": ([2.0], 10.0)},
            "Take wise-ft: of standard fine-tuning and the one recipe that does as well on new "
            "(within 1 %), it forgets least.",
        ),
        (
            {"standard": ([1.0, 1.1, 1.15], 15.0), "wise-ft": ([1.15], 11.0)},
            "the one recipe that does as well on new (within 1 %, or "
            "no worse than the worst seed of standard)",
        ),
        (  # the worst seed is within 1 %
            {"standard": ([1.0, 1.001, 1.005], 15.0), "wise-ft": ([1.001], 11.0)},
            "the one recipe that does as well on new (within 1 %), it forgets least.",
        ),
        (  # the worst seed is beyond 90 % of the gain
            {"standard": ([1.0, 1.001, 1.9], 15.0), "wise-ft": ([1.3], 11.0)},
            "Take standard: no other recipe does as well on new (within 1 %, or with at least "
            "90 % of the gain of standard).",
        ),
        (
            {"flow": ([1.0, 1.001, 1.9], 15.0), "wise-ft": ([1.05], 11.0)},
            "of the 2 recipes close to the best (within 1 %, or with at least 90 % of the gain of "
            "the best) on new",
        ),
        (
            {"standard": ([1.0], 15.0), "lora": ([2.0], 10.0)},
            "Take standard: no other recipe does as well on new (within 1 %).",
        ),
    ],
)
def test_standard_is_not_among_the_recipes_that_do_as_well(found, words):
    assert words in recommend(simple(found)).headline


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        (
            2.0,
            "Take standard lr=0.1: no other recipe does as well on new (within 1 %), and of its "
            "settings it forgets least.",
        ),
        (1.0, "Take lora: of standard fine-tuning and the one recipe that does as well on new"),
    ],
)
def test_points_of_standard_do_not_count_as_other_recipes(lora, words):
    found = simple({"standard": ([1.0], 15.0), "low": ([1.001], 12.0), "lora": ([lora], 10.0)})
    points = tuple(
        replace(run, recipe="standard", values={"lr": 0.1}) if run.recipe == "low" else run
        for run in found.runs
    )
    assert words in recommend(Results(points)).headline


def test_of_equally_good_ones_the_order_does_not_matter():
    found = {"flow": ([1.0], 15.0), "ewc": ([0.8, 1.0, 1.5], 14.0), "lora": ([1.05], 11.0)}
    assert recommend(simple(found)).label == "lora"
    assert recommend(simple(dict(reversed(found.items())))).label == "lora"


def test_without_retained_tests_the_predictions_count():
    found = simple({"flow": ([1.0], None), "ewc": ([1.001], None)})
    assert recommend(found).label == "flow"
    moved = (replace(run, kl={"other": 1.0 if run.recipe == "flow" else 0.5}) for run in found.runs)
    said = recommend(Results(tuple(moved)))
    assert said.label == "ewc"
    assert "it moves the predictions least" in said.headline
    assert "To see what was forgotten, test tasks" in str(said)


@pytest.mark.parametrize(("before", "balanced"), [(4.0, "wise-ft"), (2.4, "flow")])
def test_the_balanced_choice_costs_at_most_a_tenth_of_the_gain(before, balanced):
    found = {"flow": ([2.0], 40.0), "wise-ft": ([2.15], 12.0), "sfa": ([2.3], 11.0)}
    said = recommend(simple(found, before))
    assert (said.label, said.balanced) == ("flow", balanced)


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
    level, near, best = (known[label] for label in (said.at_standard, said.balanced, said.best))
    assert said.label == level.label
    assert best.target.after == min(s.target.after for s in better)
    standard = known.get("standard", best)
    bar = standard if standard in better else best
    worst = max(run.target.after for run in bar.runs)
    worst = min(worst, bar.target.after + (1 - NEAR) * bar.target.gain)
    assert level.target.after <= max(worst, (1 + CLOSE) * bar.target.after)
    assert near.target.gain >= NEAR * best.target.gain
    for s in better:
        if s.target.after <= max(worst, bar.target.after):
            assert level.loss <= s.loss
        if s.target.gain >= NEAR * best.target.gain:
            assert near.loss <= s.loss
    for choice in (level, near, best):  # the frontier
        assert not any(
            s.target.after < choice.target.after and s.loss < choice.loss for s in better
        )


@given(figures, st.randoms())
def test_failures_and_order_do_not_matter(found, random):
    results = simple(found)
    said = recommend(results)
    assert _labels(recommend(replace(results, failed={"x": "y"}))) == _labels(said)
    apart = {name: (some, 11.0 + i) for i, (name, (some, _)) in enumerate(found.items())}
    runs = list(simple(apart).runs)
    labels = _labels(recommend(Results(tuple(runs))))
    random.shuffle(runs)
    assert _labels(recommend(Results(tuple(runs)))) == labels


NAMES = ["holdfast", "recadam", "ewc", "lora", "flow"]


@given(figures, st.permutations(NAMES), st.booleans())
def test_the_figures_are_recommended_whatever_their_names(found, names, tested):
    """With and without retained tests, if the names of the recipes are exchanged."""
    first = simple({name: (some, kept if tested else None) for name, (some, kept) in found.items()})
    kls = {name: kept for name, (_, kept) in found.items()}
    first = replace(first, runs=tuple(replace(r, kl={"other": kls[r.recipe]}) for r in first.runs))
    other = dict(zip(found, names, strict=False))
    if "standard" in other:  # a meaning, not only a name
        other["standard"] = "standard"
    second = replace(first, runs=tuple(replace(r, recipe=other[r.recipe]) for r in first.runs))
    for one, two in zip(_labels(recommend(first)), _labels(recommend(second)), strict=True):
        assert two == (one and other[one])


def _labels(said):
    return said.label, said.at_standard, said.balanced, said.best


@given(every_results)
def test_there_is_always_something_to_say(found):
    said = recommend(found)
    labels = {run.label for run in found.runs}
    assert {*_labels(said)} <= labels | {None}
    assert all(s.endswith(".") and s.isprintable() for s in (said.headline, *said.sentences))


def moved(signals):
    """Without retained tests, of two close recipes one moves less on texts of the base."""
    kls = {
        "flow": {"context-free": 0.1, "other": 0.9, "new": 0.1},
        "ewc": {"context-free": 0.5, "other": 0.2, "new": 0.8},
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
    # The predictions on the target, new, are to change: they say nothing about forgetting.
    said = recommend(moved({who: ("context-free", "other")}))
    assert said.headline == (
        "Take flow: of the 2 recipes close to the best (within 1 %) on new, it is the best."
    )


def test_a_training_signal_is_marked_and_gets_no_star():
    text = moved({"flow": ("context-free",)}).to_markdown()
    (row,) = (line for line in text.splitlines() if line.startswith("| flow"))
    assert "0.100†" in row
    assert "0.100†\\*" not in row
    assert "† The KL was a training signal of this recipe: it is no evidence of retention." in text


def test_a_bad_seed_of_standard_does_not_make_everything_as_good():
    found = {
        "standard": ([1.0, 1.01, 3.9], 0.5), "lora": ([1.0], 0.2), "frozen": ([3.8], 0.0),
    }  # fmt: skip
    assert recommend(simple(found)).label == "lora"
