"""Which recipe is recommended, by one rule, and what is said about it."""

import math
import shlex
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.cli import finetune
from holdfast.cli._options import Parser
from holdfast.comparison.command import finetune_command
from holdfast.comparison.results import Results
from holdfast.recipe import Recipe
from holdfast.report.recommend import SHARES, Candidate, choose, recommend
from report.sample_results import PLAN, every_results, measured, run, sample_results, simple

gains = st.floats(-1, 3)
candidates = st.lists(
    st.builds(Candidate, st.text(max_size=2), gains, st.floats(0, 9) | st.just(math.inf)),
    max_size=6,
)
shares = st.floats(0.5, 1)
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
    "wise-ft": ([0.750], 10.1),
    "sfa": ([1.3], 10.0),
}


@given(candidates, shares)
def test_the_rule(found, share):
    taken = choose(found, share)
    able = [c for c in found if c.gain > 0]
    if not able:
        assert taken is None
        return
    assert taken.gain >= share * max(c.gain for c in able)
    for c in able:
        assert not (c.gain > taken.gain and c.loss <= taken.loss)  # it is never beaten on both
        if c.gain >= share * max(c.gain for c in able):
            assert taken.loss <= c.loss


@given(candidates, shares, shares)
def test_more_is_learned_as_the_share_rises(found, one, other):
    less, more = choose(found, min(one, other)), choose(found, max(one, other))
    assert (less is None) == (more is None)
    if less is not None:
        assert less.gain <= more.gain


@given(candidates, shares, st.randoms())
def test_the_order_does_not_matter(found, share, random):
    other = random.sample(found, len(found))
    one, two = choose(found, share), choose(other, share)
    assert one is two or (one.gain, one.loss) == (two.gain, two.loss)


@pytest.mark.parametrize("share", [0, 1.01, math.nan, "most"])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises((ValueError, TypeError), match="learn_at_least must be"):
        choose([Candidate("a", 1.0)], share)


def test_what_has_no_figure_is_not_taken():
    nan, inf = math.nan, math.inf
    assert choose([Candidate("a", nan, 0.0), Candidate("b", 1.0, nan)]).label == "b"
    assert choose([Candidate("a", 1.0, nan), Candidate("b", 1.0, 9.0)]).label == "b"
    assert choose([Candidate("a", 1.0, None), Candidate("b", 1.0, 9.0)]).label == "b"
    assert choose([Candidate("a", 1.0, moved=nan), Candidate("b", 1.0, moved=9.0)]).label == "b"
    assert choose([Candidate("a", inf, 0.0)]) is None


@pytest.mark.parametrize(
    ("before", "found", "taken"),
    [
        # Near a loss of 0, a small difference of the losses is none of what was learned.
        (4.5, {"standard": ([0.077], 16.6), "holdfast": ([0.099], 12.2)}, "holdfast"),
        # One that learned 98.8 % as much and forgot a third.
        (4.579, {"spd": ([2.168], 16.2), "holdfast": ([2.197], 11.9)}, "holdfast"),
        # Nearly as good as standard fine-tuning is not enough if others learn much more.
        (4.58, {"standard": ([3.0], 25.0), "flow": ([2.16], 14.6), "lora": ([2.9], 11.0)}, "flow"),
        # A bad seed makes nothing better.
        (2.0, {"standard": ([1.0, 1.01, 3.9], 11.0), "sfa": ([1.9], 10.0)}, "standard"),
    ],
)
def test_cases(before, found, taken):
    assert recommend(simple(found, before)).label == taken


def test_what_is_said():
    said = recommend(simple(FIGURES, 1.396))
    assert said.headline == (
        "Take recadam+flow: of the 3 recipes that learned at least 95 % as much as the best "
        "(flow), it forgot least."
    )
    starts = (
        "recadam+flow learned 99.4 % as much as the best (lost 0.80): perplexity 2.02 on new (0",
        "flow learned most and forgot more (lost 1.70): perplexity 2.012 on new (0.699 nats per ",
        "Standard fine-tuning learned 99.0 % as much as the best and forgot more (lost 2.43): ",
        "The pretrained model: perplexity 4.039 on new (1.396 nats per token).",
        "With another share: wise-ft at 90 %, the same at 98 and 99 %.",
        "Only one seed was run: small differences may be chance.",
        "The choice was made on these samples: confirm it on others.",
    )
    assert len(said.sentences) == len(starts)
    for sentence, start in zip(said.sentences, starts, strict=True):
        assert sentence.startswith(start)
    assert (said.label, said.best) == ("recadam+flow", "flow")
    assert said.at == {0.9: "wise-ft", 0.98: "recadam+flow", 0.99: "recadam+flow"}


def test_another_share():
    found = simple(FIGURES, 1.396)
    assert found.recommendation(0.9).label == "wise-ft"
    assert found.recommendation(1.0).label == "flow"
    saved = Results.from_json(replace(found, learn_at_least=0.9).to_json())
    said = saved.recommendation()
    assert (said.label, [*said.at]) == ("wise-ft", [0.95, 0.98, 0.99])
    assert "at least 90 % as much" in saved.to_markdown()
    with pytest.raises(ValueError, match="learn_at_least must be"):
        replace(found, learn_at_least=95)


def test_a_choice_made_on_other_data_is_taken():
    said = recommend(replace(simple(FIGURES, 1.396), taken="sfa"))
    assert said.headline == "Take sfa: a search chose it on other samples."
    assert said.sentences[0].startswith("sfa learned 13.8 % as much as the best (lost 0): perp")
    assert (said.label, said.best, said.at) == ("sfa", "flow", {})
    assert "confirm" not in str(said)


@pytest.mark.parametrize(
    ("found", "label", "words"),
    [
        ({"flow": ([1.0], 12.0)}, "flow", "the only recipe"),
        ({"flow": ([1.0], 12.0), "ewc": ([1.5], 10.0)}, "flow", "no other recipe learned at least"),
        ({"flow": ([1.0], 11.0), "ewc": ([1.0], 12.0)}, "flow", "as the best, it forgot least and"),
        (
            {"flow": ([1.0], 12.0), "ewc": ([1.0], 12.0)},
            "flow",
            "learned most of those that forgot",
        ),
        ({"flow": ([1.0], None), "ewc": ([1.01], None)}, "flow", "as the best, it learned most."),
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


def test_standard_that_learned_nothing():
    said = recommend(simple({"flow": ([1.0], 12.0), "standard": ([2.5], 11.0)}))
    assert "Standard fine-tuning did not improve the target and forgot less (lost " in str(said)


def test_losses_of_all_tests_count_on_the_scale_of_the_verdict():
    """5 % of a perplexity, 0.05 nats and 1 point weigh alike, whatever the values before."""
    tests = {
        "one": measured("a", "perplexity", 20.0, 21.0),
        "two": measured("a", "nll", 3.0, 3.05),
        "three": measured("a", "accuracy", 0.9, 0.89, lower=False),
    }
    assert [run(name, retained=(test,)).loss for name, test in tests.items()] == pytest.approx(
        [1] * 3
    )
    gained = measured("b", "nll", 3.0, 1.0)
    assert run("x", retained=(tests["two"], gained)).loss == pytest.approx(0.5)


def test_failures_and_seeds_are_mentioned():
    found = sample_results(seeds=(0,), failed={"mas-0-1": "RuntimeError: no"})
    assert "1 of 12 runs failed." in recommend(found).sentences
    assert "Only one seed was run: small differences may be chance." in recommend(found).sentences


@given(figures)
def test_medians_over_seeds_count(found):
    results = simple(found)
    known = {s.label: s for s in results.summaries()}
    said = recommend(results)
    rows = [Candidate(label, s.target.gain, s.loss) for label, s in known.items()]
    assert said.label == (choose(rows).label if choose(rows) else None)
    assert said.at == {
        share: choose(rows, share).label
        for share in SHARES
        if share != 0.95 and choose(rows) and len(rows) > 1
    }


NAMES = ["holdfast", "recadam", "ewc", "lora", "flow"]


@given(figures, st.permutations(NAMES), st.booleans())
def test_the_figures_are_recommended_whatever_their_names(found, names, tested):
    """With and without retained tests, if the names of the recipes are exchanged."""
    first = simple({name: (some, kept if tested else None) for name, (some, kept) in found.items()})
    kls = {name: kept for name, (_, kept) in found.items()}
    first = replace(first, runs=tuple(replace(r, kl={"other": kls[r.recipe]}) for r in first.runs))
    other = dict(zip(found, names, strict=False))
    second = replace(first, runs=tuple(replace(r, recipe=other[r.recipe]) for r in first.runs))
    one, two = recommend(first), recommend(second)
    assert two.label == other.get(one.label)
    assert two.at == {share: other[label] for share, label in one.at.items()}


@given(every_results)
def test_there_is_always_something_to_say(found):
    said = recommend(found)
    labels = {run.label for run in found.runs}
    assert {said.label, said.best, *said.at.values()} <= labels | {None}
    assert all(s.endswith(".") and s.isprintable() for s in (said.headline, *said.sentences))
    assert said.next.isprintable()


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
    said = recommend(moved({}))
    assert said.label == "flow"
    assert "it moved the predictions least and learned most" in said.headline
    assert "To see what was forgotten, test tasks" in str(said)
    assert recommend(moved({who: ("context-free",)})).label == "ewc"
    # The predictions on the target, new, are to change: they say nothing about forgetting.
    said = recommend(moved({who: ("context-free", "other")}))
    assert said.label == "flow"
    assert said.headline.endswith("it learned most.")


def test_a_training_signal_is_marked_and_gets_no_star():
    text = moved({"flow": ("context-free",)}).to_markdown()
    (row,) = (line for line in text.splitlines() if line.startswith("| flow"))
    assert "0.100†" in row
    assert "0.100†\\*" not in row
    assert "† The KL was a training signal of this recipe: it is no evidence of retention." in text


def options_of(command):
    """What ``holdfast finetune`` reads from a line."""
    program, name, *words = shlex.split(command)
    assert (program, name) == ("holdfast", "finetune")
    parser = Parser()
    finetune.add_options(parser)
    return parser.parse(words)


def test_the_command_trains_the_recipe_as_it_was_trained():
    recipe = Recipe.preset("wise-ft").with_settings({"merging.alpha": 0.3})
    one = run("wise-ft", settings=recipe.to_dict(), values={"merging.alpha": 0.3, "epochs": 2.0})
    plan = {
        **PLAN, "data": ["a b.jsonl", "$(c).jsonl"], "new": ["head"], "head": "auto",
        "columns": {"question": "my problem"}, "rates": {"wise-ft": 1e-4},
        "training": {"lr": None, "packing": True, "clip_norm": None, "precision": "bfloat16"},
    }  # fmt: skip
    read = options_of(finetune_command(plan, one))
    assert (read.model, read.data) == (PLAN["model"], plan["data"])
    assert (read.recipe, read.set, read.lr) == ("wise-ft", {"merging.alpha": 0.3}, 1e-4)
    assert (read.epochs, read.packing, read.clip_norm) == (2.0, True, None)
    assert (read.precision, read.columns, read.new) == ("bfloat16", plan["columns"], ["head"])
    assert sample_results().recommendation().next == (
        "holdfast finetune --model HuggingFaceTB/SmolLM2-135M --data gsm8k-train.jsonl --recipe "
        "lora --lr 0.001 --out tuned-lora"
    )


def test_a_recipe_file_and_what_a_command_cannot_say(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.yaml").write_text("update: {name: adamw, lr: 1.0e-3}\n")
    own = Recipe.from_yaml((tmp_path / "own.yaml").read_text())
    plan = {**PLAN, "recipes": ["own.yaml"]}
    read = options_of(finetune_command(plan, run("own", settings=own.to_dict())))
    assert (read.recipe, read.lr) == ("own.yaml", None)  # its own
    changed = own.with_settings({"update.lr": 0.5}).to_dict()
    assert options_of(finetune_command(plan, run("own", settings=changed))).set == {
        "update.lr": 0.5
    }
    # Methods that were chosen for the model.
    other = run("flow", settings=Recipe.preset("wise-ft").to_dict())
    assert finetune_command(PLAN, other) == ""
    assert finetune_command({}, other) == ""
    assert finetune_command(PLAN, run("unknown")) == ""


def test_a_command_does_not_merge_the_settings_of_two_penalties():
    recipe = Recipe.preset("ewc+l2-sp")
    assert "--set" not in finetune_command(PLAN, run("ewc+l2-sp", settings=recipe.to_dict()))
    ewc, l2 = recipe.to_dict()["penalties"]
    for strengths, said in (((7.0, 7.0), {"penalties.strength": 7}), ((7.0, 8.0), None)):
        both = [{**one, "strength": s} for one, s in zip((ewc, l2), strengths, strict=True)]
        settings = {**recipe.to_dict(), "penalties": both}
        command = finetune_command(PLAN, run("ewc+l2-sp", settings=settings))
        assert (options_of(command).set if said else command) == (said or "")


@pytest.mark.parametrize(
    "changed",
    [
        {"data": "--trust-remote-code"},
        {"training": {"lr": "--trust-remote-code"}},
        {"training": {"epochs": "--trust-remote-code"}},
        {"columns": {"--trust-remote-code": ""}},
        {"head": "--trust-remote-code"},
        {"model": "a\x1b[2J"},
        {"model": "a  b"},
    ],
)
def test_a_plan_of_others_gives_no_options(changed):
    one = run("flow", settings=Recipe.preset("flow").to_dict())
    trusting = {**PLAN, "trust_remote_code": True, "allow_pickle": True}
    assert {"trust", "pickle"}.isdisjoint(finetune_command(trusting, one).replace("-", " ").split())
    assert finetune_command({**PLAN, **changed}, one) == ""


def test_a_command_has_all_digits():
    one = run("flow", settings=Recipe.preset("flow").to_dict())
    plan = {**PLAN, "training": {"lr": 0.000123456789}}
    assert options_of(finetune_command(plan, one)).lr == 0.000123456789
