import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from holdfast.evaluate.report import (
    Divergence,
    Drift,
    DriftRow,
    Estimate,
    ForgettingReport,
    Score,
    Vocabulary,
)
from holdfast.report.verdict import verdict
from holdfast.report.words import change_of
from report.reports import reports
from report.sample_report import drift, estimate, sample, score


def report(*scores, **more):
    return ForgettingReport("base", "tuned", scores=scores, **more)


def kl(value, name="context-free"):
    return Divergence(name, estimate(value, value / 10, 64), 4096, "token", "")


PIQA = score("PIQA", "accuracy", 0.684, 0.653, 0.02, 0.009, 1838)
WIKI = score("WikiText", "nll", 2.80, 2.92, 0.03, 0.012, 248, lower=True)
ARC = score("ARC-easy", "accuracy", 0.58, 0.577, 0.02, 0.008, 2376)
STILL = Drift(DriftRow("all", 0.0, 9.0, 100), (), (), ())


def test_losses_the_worst_first():
    said = verdict(report(WIKI, ARC, PIQA))
    assert said.headline == "Some forgotten: kept 95 % (worst: PIQA, −3.1 points)."
    assert said.sentences == (
        "Lost 3.1 points on PIQA and 0.120 nats per token on WikiText.",
        "No measurable change on ARC-easy (±0.8 points).",
    )
    assert said.forgotten == "some"
    assert said.kept == pytest.approx((0.653 / 0.684 + math.exp(-0.12) + 0.577 / 0.58) / 3)


def test_the_sample():
    assert str(verdict(sample())) == (
        "Much forgotten: kept 92 % (worst: LAMBADA, −6.3 points).\n"
        "Learned: GSM8K loss 1.396 → 0.805.\n"
        "Lost 6.3 points on LAMBADA, 3.1 points on PIQA and 0.118 nats per token on WikiText-2.\n"
        "No measurable change on ARC-easy (±0.8 points).\n"
        "Predictions moved by 0.412 nats per token on gsm8k-test.jsonl and 0.083 nats per token on "
        "the base model's own texts.\n"
        "The weights moved by 0.92 % of their norm, most in model.layers.19 (2.5 %).\n"
        "Next: holdfast merge HuggingFaceTB/SmolLM2-135M runs/smollm2-gsm8k --sweep 0.5 0.7 0.85 1 "
        "--out runs/smollm2-gsm8k-merged"
    )


def test_the_same_model_forgot_nothing():
    same = score("PIQA", "accuracy", 0.684, 0.684, 0.02, 0.0, 1838)
    said = verdict(report(same, drift=STILL, divergences=(kl(0.0),)))
    assert said.headline == "Nothing forgotten: kept 100 % (no measurable loss on PIQA)."
    assert (said.forgotten, said.kept, said.next) == ("nothing", 1, "")
    assert verdict(report(drift=STILL)).headline == "Nothing forgotten."
    assert verdict(report(divergences=(kl(0.0),))).headline == "Nothing forgotten."


def test_chance_is_said_of_the_retained_tests_only():
    few = replace(WIKI, change=Estimate(0.12, None, None, 1))
    learned = score("new", "nll", 6.0, 1.279, 0.03, 0.012, 100, lower=True, role="target")
    said = verdict(report(few, learned))
    assert said.headline == "The changes on the retained tests cannot be distinguished from chance."
    assert said.sentences[0] == "Learned: new loss 6.000 → 1.279."
    assert said.next == "test more samples."


@pytest.mark.parametrize("more", ["only_base", "only_tuned"])
def test_other_tensors_may_forget(more):
    said = verdict(report(drift=replace(STILL, **{more: ("lora_A",)})))
    assert said.forgotten == "unknown"
    assert "model lacks lora_A." in str(said)


def test_without_scores_forgetting_was_not_tested():
    said = verdict(report(drift=drift(), divergences=(kl(0.08),)))
    assert said.headline == "Forgetting was not tested."
    predictions = "Predictions moved by 0.080 nats per token on the base model's own texts."
    assert said.sentences[0] == predictions
    assert said.forgotten == "unknown"
    assert said.next == "holdfast measure base tuned --skills"
    two = verdict(report(divergences=(kl(0.08), kl(0.4, "a.txt"))))
    assert two.sentences[0].endswith("and 0.400 nats per token on a.txt.")
    only = verdict(report(drift=drift()))
    moved = "The weights moved by 0.92 % of their norm, most in model.layers.19 (2.5 %)."
    assert only.sentences[0] == moved


def test_a_target_alone_tests_no_forgetting():
    target = replace(PIQA, role="target")
    said = verdict(report(target))
    assert said.forgotten == "unknown"
    assert said.sentences == ("Nothing learned: PIQA accuracy 68.4 % → 65.3 % (worse).",)
    better = score("GSM8K", "exact_match", 0.02, 0.14, 0.01, 0.01, 1319, role="target")
    same = score("GSM8K", "nll", 0.8, 0.8, 0.01, 0.01, 1319, lower=True, role="target")
    assert verdict(report(ARC, same, better)).sentences[0] == (
        "Learned: GSM8K exact_match 2.0 % → 14.0 %; loss 0.800 → 0.800 (no measurable change)."
    )


def test_nothing_was_measured():
    said = verdict(report())
    assert (said.headline, said.forgotten) == ("Forgetting was not tested.", "unknown")
    assert said.sentences == ("Nothing was measured.",)


def test_no_measurable_loss():
    better = score("LAMBADA", "acc", 0.4, 0.45, 0.01, 0.01, 5153)
    said = verdict(report(ARC, better))
    assert said.headline == (
        "Nothing forgotten: kept 99.7 % (no measurable loss on LAMBADA and ARC-easy)."
    )
    assert said.forgotten == "nothing"
    assert "Improved by 5.0 points on LAMBADA." in said.sentences


def test_nan_weights_come_first():
    broken = replace(drift(), not_finite=("a.weight", "b.weight"))
    said = verdict(report(PIQA, drift=broken))
    assert said.headline == (
        "The tuned model is broken: 2 tensors hold NaN or infinity (a.weight and b.weight)."
    )
    assert said.sentences[0] == "Lost 3.1 points on PIQA."
    assert said.forgotten == "much"


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_score_that_is_not_finite_is_loud(odd):
    change = Estimate(odd, odd, odd, 9)
    said = verdict(report(replace(WIKI, after=change, change=change)))
    assert said.headline == "The tuned model gives NaN or infinity on WikiText."
    assert said.forgotten == "much"
    assert "No measurable" not in str(said)
    two = verdict(report(ARC, replace(WIKI, after=change, change=change)))
    unchanged = "No measurable change on ARC-easy (±0.8 points)."
    assert (two.headline, two.sentences[0]) == (said.headline, unchanged)
    base = verdict(report(replace(WIKI, before=change, change=change), divergences=(kl(odd),)))
    assert base.headline == "The base model gives NaN or infinity on WikiText."
    assert (base.forgotten, base.sentences) == ("unknown", ())
    moved = verdict(report(divergences=(kl(odd, "a.txt"),)))
    assert moved.headline == "The tuned model's divergence on a.txt is NaN or infinite."
    assert moved.forgotten == "much"


def test_nan_weights_of_the_base():
    broken = replace(drift(), not_finite=("a.weight", "b.weight"), base_not_finite=("a.weight",))
    said = verdict(report(drift=broken))
    assert said.headline == "The base model is broken: 1 tensor holds NaN or infinity (a.weight)."
    assert said.sentences[0].startswith("The tuned model is broken: 1 tensor holds")
    assert said.forgotten == "unknown"


def test_of_two_vocabularies_the_common_rows_are_compared():
    two = replace(drift(), vocabulary=Vocabulary(500, 502, ("<|tool|>", "<|end|>")))
    said = str(verdict(report(drift=two)))
    assert "Only the rows of tokens that both models have are compared." in said
    assert "merged" not in said


def test_without_an_interval_it_may_be_chance():
    said = verdict(report(replace(PIQA, change=Estimate(-0.031, None, None, 1838))))
    assert said.forgotten == "unknown"
    assert said.sentences[0] == (
        "Worse by 3.1 points on PIQA; without an interval this may be chance."
    )
    one = replace(PIQA, change=Estimate(-1.0, -1.0, -1.0, 1))
    assert verdict(report(one)).forgotten == "unknown"


@pytest.mark.parametrize(
    ("metric", "before", "after", "lower", "words"),
    [
        ("perplexity", 20.0, 21.66, True, "92 % (worst: X, perplexity +8.3 %)"),
        ("perplexity", 20.0, 59.5, True, "34 % (worst: X, perplexity +198 %)"),
        ("perplexity", 20.0, 84.1, True, "24 % (worst: X, perplexity 4.2-fold)"),
        ("perplexity", 9.21, 227.1, True, "4 % (worst: X, perplexity 25-fold)"),
        ("perplexity", 10.0, 2e9, True, "0 % (worst: X, perplexity over 1,000,000-fold)"),
        ("word_perplexity,none", 20.0, 22.4, True, "89 % (worst: X, perplexity +12.0 %)"),
        ("nll", 2.0, 2.04, True, "96 % (worst: X, +0.040 nats per token)"),
        ("nll", 2.0, 2.0001, True, "99.9 % (worst: X, +0.0001 nats per token)"),
        ("acc,none", 0.5, 0.4, False, "80 % (worst: X, −10.0 points)"),
        ("bleu", 30.0, 28.5, False, "95 % (worst: X, −1.5 bleu)"),
    ],
)
def test_amounts(metric, before, after, lower, words):
    some = score("X", metric, before, after, 0.0, abs(after - before) / 2, 100, lower)
    assert verdict(report(some)).headline.partition(": kept ")[2] == f"{words}."


def test_perplexities_rise_beside_what_is_lost():
    some = score("wiki", "perplexity", 20.0, 50.0, 0.0, 1.0, 100, True)
    said = verdict(report(some, PIQA)).sentences[0]
    assert said == "Lost 3.1 points on PIQA; perplexity rose 150 % on wiki."
    less, more = replace(some, name="code"), score("prose", "ppl", 2.0, 9.0, 0.0, 1.0, 100, True)
    said = verdict(report(some, less)).sentences[0]
    assert said == "Perplexity rose 150 % on wiki and 150 % on code."
    said = verdict(report(some, more)).sentences[0]
    assert said == "Perplexity rose 4.5-fold on prose and 150 % on wiki."


def test_a_handful_of_samples_says_nothing():
    some = score("X", "acc", 1.0, 0.5, 0.0, 0.1, 3, False)
    assert verdict(report(some)).forgotten == "unknown"


def test_many_losses_are_cut_short():
    said = verdict(report(*(replace(PIQA, name=f"task {i}") for i in range(57))))
    assert said.headline == "Some forgotten: kept 95 % (worst: task 0, −3.1 points)."
    chance = "By chance alone, about 1 of 57 tests would show a loss."
    assert said.sentences == ("Lost on 57 of 57 tests.", chance)
    still = verdict(report(PIQA, *(replace(ARC, name=f"task {i}") for i in range(9))))
    assert still.sentences == ("No measurable change on 9 tests.",)


def test_two_metrics_of_one_task_are_told_apart():
    said = verdict(report(PIQA, replace(PIQA, metric="acc_norm")))
    assert "PIQA accuracy" in said.headline
    assert "PIQA acc_norm" in said.sentences[0]
    targets = [replace(ARC, metric=m, role="target") for m in ("accuracy", "acc_norm")]
    assert verdict(report(*targets)).sentences == (
        "Nothing learned: ARC-easy accuracy 58.0 % → 57.7 % (no measurable change); acc_norm "
        "58.0 % → 57.7 % (no measurable change).",
    )


@given(reports)
def test_every_report_has_a_verdict(some):
    said = verdict(some)
    assert all(s and s.endswith(".") and s.isprintable() for s in (said.headline, *said.sentences))
    assert said.forgotten in ("nothing", "little", "some", "much", "unknown")
    assert said.next.isprintable()
    assert said.kept is None or 0 <= said.kept <= 1
    if some.drift is not None and some.drift.not_finite:
        assert said.headline.startswith(("The tuned model is broken", "The base model "))


finite = st.floats(-1, 1).filter(lambda x: x == 0 or abs(x) > 1e-6)
kinds = st.sampled_from(["accuracy", "nll", "perplexity", "bleu"])


@given(finite, finite, finite, kinds, st.booleans())
def test_a_loss_needs_an_interval_without_zero(a, b, c, metric, lower):
    low, value, high = sorted((a, b, c))
    some = Score("x", metric, lower, Estimate(2.0, 2.0, 2.0, 9), Estimate(2 + value, 0, 3, 9),
                 Estimate(value, low, high, 9))  # fmt: skip
    outcome = change_of(some).outcome
    if low <= 0 <= high:
        assert outcome == "no measurable change"
        assert verdict(report(some)).forgotten == "nothing"
    else:
        assert outcome == ("lost" if (value > 0) == lower else "gained")
        assert (verdict(report(some)).forgotten == "nothing") == (outcome == "gained")


@given(finite, finite, kinds, st.booleans())
def test_what_is_lost_one_way_is_gained_the_other(a, b, metric, lower):
    low, high = sorted((a, b))
    assume(low > 0 or high < 0)
    at = Estimate(2.0, 2.0, 2.0, 9)
    there = Score("x", metric, lower, at, at, Estimate((low + high) / 2, low, high, 9))
    back = replace(there, change=Estimate(-(low + high) / 2, -high, -low, 9))
    assert {change_of(there).outcome, change_of(back).outcome} == {"lost", "gained"}
    assert change_of(there).amount == change_of(back).amount


def test_a_training_signal_is_no_evidence():
    trained = replace(kl(0.08), trained_on=True)
    said = verdict(report(divergences=(trained, kl(0.4, "a.txt"))))
    assert said.sentences[1] == (
        "The divergence on the base model's own texts was a training signal: it is no evidence of "
        "retention."
    )
    still = verdict(report(divergences=(replace(trained, kl=kl(0.0).kl),)))
    assert still.headline == "Forgetting was not tested."
