import shlex
from dataclasses import replace

import pytest

from holdfast.evaluate.report import Divergence, ForgettingReport
from report.sample_report import estimate, score

TESTS = "holdfast measure 'my base' tuned/ --target dev.jsonl --text wiki.txt"
WORSE = score("PIQA", "accuracy", 0.684, 0.653, 0.02, 0.009, 1838)
SAME = score("PIQA", "accuracy", 0.684, 0.684, 0.02, 0.009, 1838)
FEW = score("PIQA", "accuracy", 0.684, 0.2, 0.02, 0.009, 4)
LEARNED = score("GSM8K", "nll", 4.6, 2.3, 0.1, 0.1, 100, lower=True, role="target")
NOT = score("GSM8K", "nll", 4.6, 4.6, 0.1, 0.1, 100, lower=True, role="target")
LOST = score("GSM8K", "nll", 2.3, 3.6, 0.1, 0.1, 100, lower=True, role="target")
CHANCE = score("GSM8K", "nll", 4.6, 2.3, 0.1, 0.1, 4, lower=True, role="target")
LOW = score("RTE", "accuracy", 0.5, 0.85, 0.02, 0.02, 100, role="target")

MERGE = (
    "holdfast merge 'my base' tuned/ --sweep 0.5 0.7 0.85 1 --target dev.jsonl --text wiki.txt "
    "--out tuned-merged"
)
LONGER = "holdfast finetune --config tuned/config.yaml --epochs 3 --out tuned-3-epochs"
AGAIN = "train again at another learning rate."
MORE = "train for longer, or at a higher learning rate."


def after(*scores, **settings):
    settings = {"command": TESTS, **settings}
    return ForgettingReport("my base", "tuned", scores=scores, settings=settings).verdict().next


@pytest.mark.parametrize(
    ("scores", "epochs", "said"),
    [
        ((SAME, LEARNED), None, "use it."),
        ((WORSE, LEARNED), None, MERGE),
        ((WORSE,), None, MERGE),
        ((WORSE, LOW), 1.0, MERGE),  # more epochs would forget more
        ((WORSE, LEARNED, LOST), None, MERGE),
        ((SAME, LEARNED, LOST), None, AGAIN),
        ((SAME, LOST), 1.0, AGAIN),
        ((LOST,), 1.0, AGAIN),
        ((WORSE, NOT), 1.0, AGAIN),
        ((SAME, NOT), 1.0, LONGER),
        ((NOT,), 1.0, LONGER),
        ((SAME, NOT), 5.0, MORE),
        ((SAME, NOT), -1.0, MORE),
        ((SAME, NOT), None, MORE),
        ((SAME, LOW), 1.0, f"use it, or try more epochs: {LONGER}"),
        ((SAME, LOW), 3.0, "use it."),
        ((SAME, LOW), None, "use it."),
        ((SAME, CHANCE), 1.0, "test more samples."),
        ((FEW, LEARNED), None, "test more samples."),
        ((LOW,), 1.0, f"try more epochs: {LONGER}"),
        ((LOW,), 3.0, f"{TESTS} --retained FILE"),
        ((SAME, LOW, LOST), 1.0, AGAIN),
    ],
)  # fmt: skip
def test_the_rules(scores, epochs, said):
    assert after(*scores, epochs=epochs) == said


@pytest.mark.parametrize(
    ("per", "tests"),
    [("token", "--skills"), ("masked token", "--text FILE"), (None, "--retained FILE")],
)
def test_what_was_not_tested_is_tested(per, tests):
    kl = () if per is None else (Divergence("a", estimate(0.1, 0.01, 9), 99, per, ""),)
    report = ForgettingReport("base", "tuned", divergences=kl, scores=(LEARNED,))
    assert report.verdict().next == f"holdfast measure base tuned {tests}"
    command = "holdfast measure a b --text wiki.txt --limit 9"
    assert after(SAME, command=command) == f"{command} --target FILE"


def test_names_of_others_cannot_act_in_a_shell():
    bad = "x; rm -rf ~ $(id) `id` \x1b[31m\n'"
    report = ForgettingReport(bad, bad, scores=(WORSE, LEARNED))
    for command in ("", f"holdfast measure a b --text {shlex.quote(bad)}", f"a b c {bad}", "'"):
        assert replace(report, settings={"command": command}).verdict().next == ""
    bad = "x; rm -rf ~ $(id) `id`'"
    some = after(WORSE, command=shlex.join(["holdfast", "measure", "a", "b", "--text", bad]))
    assert shlex.split(some)[9:] == ["--text", bad, "--out", "b-merged"]


@pytest.mark.parametrize(
    "words",
    ["a b --trust-remote-code", "a b --text a --allow-pickle", "a b --overwrite", "a b --out c",
     "a b -text c", "a b c --text a", "a --text a"],
)  # fmt: skip
def test_a_file_of_others_gives_no_options_but_tests(words):
    said = after(WORSE, command=f"holdfast measure {words}")
    assert said == "holdfast merge 'my base' tuned --sweep 0.5 0.7 0.85 1 --out tuned-merged"
