import shlex
from dataclasses import replace

import pytest

from holdfast.evaluate.report import Divergence, ForgettingReport
from report.sample_report import estimate, score

TESTS = "holdfast measure 'my base' tuned --target dev.jsonl --text wiki.txt"
WORSE = score("PIQA", "accuracy", 0.684, 0.653, 0.02, 0.009, 1838)
SAME = score("PIQA", "accuracy", 0.684, 0.684, 0.02, 0.009, 1838)
LEARNED = score("GSM8K", "nll", 4.6, 2.3, 0.1, 0.1, 100, lower=True, role="target")
NOT = score("GSM8K", "nll", 4.6, 4.6, 0.1, 0.1, 100, lower=True, role="target")
LOW = score("RTE", "accuracy", 0.5, 0.85, 0.02, 0.02, 100, role="target")


def after(*scores, **settings):
    settings = {"command": TESTS, **settings}
    return ForgettingReport("my base", "tuned", scores=scores, settings=settings).verdict().next


def test_a_good_run_is_used():
    assert after(SAME, LEARNED) == "use it."


def test_a_run_that_forgot_is_merged_with_the_same_tests():
    assert after(WORSE, LEARNED) == (
        "holdfast merge 'my base' tuned --sweep 0.5 0.7 0.85 1 --target dev.jsonl --text wiki.txt "
        "--out tuned-merged"
    )
    assert after(WORSE).startswith("holdfast merge")


def test_a_target_that_is_low_after_few_epochs_is_trained_for_longer():
    longer = "holdfast finetune --config tuned/config.yaml --epochs 3 --out tuned-3-epochs"
    assert after(SAME, LOW, epochs=1.0) == after(SAME, NOT, epochs=1.0) == longer
    assert after(WORSE, LOW, epochs=1.0) == after(LOW, epochs=1.0) == longer
    assert after(SAME, LOW, epochs=3.0) == after(SAME, LOW) == "use it."
    assert "longer" in after(SAME, NOT)
    assert "learning rate" in after(WORSE, NOT, epochs=1.0)


@pytest.mark.parametrize(
    ("per", "tests"),
    [("token", "--skills"), ("masked token", "--text FILE"), (None, "--retained FILE")],
)
def test_what_was_not_tested_is_tested(per, tests):
    kl = () if per is None else (Divergence("a", estimate(0.1, 0.01, 9), 99, per, ""),)
    report = ForgettingReport("base", "tuned", divergences=kl, scores=(LEARNED,))
    assert report.verdict().next == f"holdfast measure base tuned {tests}"
    assert after(SAME) == f"{TESTS} --target FILE"


def test_names_of_others_cannot_act_in_a_shell():
    bad = "x; rm -rf ~ $(id) `id` \x1b[31m\n'"
    report = ForgettingReport(bad, bad, scores=(WORSE, LEARNED))
    for command in ("", f"holdfast measure a b --text {shlex.quote(bad)}", f"a b c {bad}", "'"):
        some = replace(report, settings={"command": command}).verdict().next
        assert some.isprintable()
        assert some == shlex.join(shlex.split(some))  # one command, each word quoted
        assert some.startswith("holdfast merge")
