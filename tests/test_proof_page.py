"""What the page of the proof says of results, also of missing and unfinished ones."""

import doctest
import json
import math
import re

import pytest

from proof_runs import (
    PROOF,
    ability_runs,
    ablation_runs,
    continual_runs,
    encoder_runs,
    language_runs,
    load,
    rate_run,
    texts,
    write,
)

pytestmark = pytest.mark.usefixtures("proof_scripts")


@pytest.fixture
def page(monkeypatch):
    """The blocks of the page for a verdict, by name."""

    def blocks(found):
        with monkeypatch.context() as patch:
            patch.setattr(load("verdict"), "read", lambda: found)
            made = {make.__name__: make for make in load("_proof_tables").TABLES}
            del made["proof_small"], made["proof_capacity"]  # which have files of their own
            return {name: make() for name, make in made.items()}

    return blocks


@pytest.mark.parametrize("name", ["_proof_text", "_proof_tables"])
def test_examples(name):
    assert doctest.testmod(load(name)).failed == 0


def test_self_replay_on_the_small_model(tmp_path, monkeypatch):
    small = load("_proof_small")
    assert doctest.testmod(small).failed == 0
    monkeypatch.setattr(small, "RESULTS", tmp_path)
    assert small.proof_small() == ""

    def run(recipe, target, prose):
        tests = [{"name": "prose", "before": math.exp(3), "after": math.exp(prose)}]
        return {"recipe": recipe, "target": {"before": 4.0, "after": target}, "retained": tests}

    runs = [
        run("plain-x1", 3.0, 5.0), run("plain-x2", 2.0, 6.0), run("default", 2.2, 3.1),
        run("default", 2.0, 3.2), run("default", 2.4, 3.15), run("texts", 2.2, 3.1),
        run("texts-untrained", 2.5, 4.0),
    ]  # fmt: skip
    record = {"runs": runs, "device": "CPU", "versions": {"torch": "2"}, "date": "2026-01-01"}
    (tmp_path / "small_model.json").write_text(json.dumps(record))
    block = small.proof_small()
    assert "its loss falls from 4.00 to 2.00 nats. Learned / kept, in percent" in block
    assert "(medians of 3 seeds)" in block
    assert "; plain fine-tuning, × 2, its best 100.0 / 50.0; " in block
    assert "; self-replay, × 1, its default 90.0 / 95.2; " in block
    assert "; texts of an untrained model 75.0 / 75.0.\n" in block
    assert "Plain fine-tuning is best at × 2, chosen on" in block
    assert "| strength | 1, the default | 90.0 | 95.2 | 2.200 | 3.150 |" in block


def test_a_learning_rate_that_is_not_the_default_is_named(tmp_path, page):
    for lr, told in ((9.1e-5, True), (5e-4, False)):
        runs = [run | {"lr": lr} for run in language_runs()]
        block = page(write(tmp_path, smollm2_gsm8k=runs))["proof_headline"]
        said = (
            "`holdfast` ran at the learning rate 9.1e-05, which was its default then; it is 0.0005"
        )
        assert (said in block) == told


def test_without_results_the_page_says_so_and_nothing_is_drawn(tmp_path, page):
    verdict, pictures = load("verdict"), load("proof_pictures")
    assert not verdict.stale(tmp_path)
    found = verdict.read(tmp_path)
    blocks = page(found)
    assert "not been run yet" in blocks.pop("proof_verdict")
    assert set(blocks.values()) == {""}
    pictures.draw(found, tmp_path)
    assert not [*tmp_path.iterdir()]
    assert pictures.stale(found, tmp_path) == []


def test_incomplete_results_are_left_out_and_named(tmp_path, page):
    without = [run for run in language_runs() if run["plan"] != "holdfast"]
    found = write(
        tmp_path, smollm2_mbpp=without, smollm2_boolq=language_runs(), ablations=ablation_runs()
    )
    assert [*found["settings"]] == ["smollm2_boolq"]
    blocks = page(found)
    told = blocks["proof_verdict"]
    assert "reaches 99 % of both in 1 of 1 settings** (1 strictly), and 98 % of both in 1." in told
    assert "99/99 is reached in 1 of the 1 settings that were seen during development." in told
    assert "not reached in" not in told
    assert "better in one) in 1 of 1 settings, with 1 of 4 points, 0 clearly." in told
    assert "real old data does so in 1 of 1 settings, with 1 of 1 points, 0 clearly." in told
    assert "missing runs: SmolLM2-135M, MBPP (holdfast)." in told
    assert "without results: SmolLM2-135M, GSM8K; SmolLM2-135M, Shakespeare; " in told
    learned = "100.0<br>(98.0&nbsp;to&nbsp;101.0)"
    assert f"| SmolLM2-135M, BoolQ | seen | {learned} | 99.7" in told
    assert "| WikiText-2 99.3 | 87.5 | **99/99 strictly** | — | 1 of 4, 0 clearly |" in told
    assert (
        "is there in 1 of 1 settings. So are 1 of 4 points of methods without old data and 1 of 1 "
        "of rehearsal with real old data. Points outside the picture: 1." in blocks["proof_all"]
    )
    equal = blocks["proof_equal_target"]
    assert (
        "A method without old data reaches this target in 2 of 3 cases. Of the others, 1 have a "
        "single point. Where it does, it keeps less than `holdfast` in 1 of 2 cases." in equal
    )
    assert "Rehearsal of real old data reaches this target in 1 of 1 cases. Where" in equal
    assert blocks["proof_limits"] == ""
    # The best of plain comes from GSM8K's results, which are missing.
    assert (blocks["proof_ablations"], blocks["proof_continual"]) == ("", "")
    assert (
        "| WikiText-2, nats per token | 3.000 | 4.000 | 3.020 | 75.0 | 99.3 | 36.8 | 98.0 |"
        in (blocks["proof_details"])
    )


def test_unfinished_settings_are_shown_with_their_missing_runs_and_not_counted(tmp_path, page):
    write(tmp_path, minilm_rte=encoder_runs())
    found = write(
        tmp_path, missing=["holdfast-s3", "top-8-s0"], smollm2_gsm8k=language_runs(),
        ablations=ablation_runs(), continual=continual_runs(),
    )  # fmt: skip
    assert ([*found["settings"]], [*found["unfinished"]]) == (["minilm_rte"], ["smollm2_gsm8k"])
    blocks = page(found)
    told = blocks["proof_verdict"]
    assert "in 0 of 1 settings**" in told
    assert "with their missing runs: SmolLM2-135M, GSM8K (holdfast-s3, top-8-s0)." in told
    assert "| 87.5 | not finished |" in told
    assert "SmolLM2-135M, GSM8K (not finished): all tests" in blocks["proof_details"]
    assert "commit abc. Missing runs: holdfast-s3, top-8-s0." in blocks["proof_details"]
    for block in ("proof_ablations", "proof_continual"):
        assert " Missing runs: holdfast-s3, top-8-s0." in blocks[block]
    assert "SmolLM2" not in blocks["proof_tests"]
    (tmp_path / "minilm_rte.json").unlink()
    load("verdict").write(tmp_path)
    told = page(load("verdict").read(tmp_path))["proof_verdict"]
    assert told.startswith("- Settings that are not finished")


def test_missing_runs_of_opponents_are_named_and_the_setting_counts(tmp_path, page):
    write(tmp_path, minilm_rte=encoder_runs())
    found = write(tmp_path, missing=["lora-x1-s1", "plain-x4-s0"], smollm2_gsm8k=language_runs())
    assert {*found["settings"]} == {"minilm_rte", "smollm2_gsm8k"}
    blocks = page(found)
    told = blocks["proof_verdict"]
    assert "in 1 of 2 settings**" in told
    assert "- 2 runs of opponents and of other learning rates are missing in 1 settings; " in told
    assert "without them 99/99 is reached in 0 of 1." in blocks["proof_headline"]
    assert "not finished" not in told + blocks["proof_details"]
    assert "commit abc. Missing runs: lora-x1-s1, plain-x4-s0." in blocks["proof_details"]


def test_rehearsal_is_shown_with_a_note(tmp_path, page):
    details = page(write(tmp_path, smollm2_gsm8k=language_runs()))["proof_details"]
    # Below the table at equal target, and below that of points.
    assert details.count("- *rehearsal of real old data*: it trains on real old text") == 2


def test_the_block_of_abilities(tmp_path, page):
    block = page(write(tmp_path, abilities=ability_runs()))["proof_limits"]
    assert block.startswith("## What it does not protect\n")
    assert "saturation" not in block
    assert (
        "- Tests that are kept to 98 % or more, of 3: holdfast 2, plain fine-tuning × 1 1, LoRA × "
        "6 2.\n"
        "- `holdfast` keeps less than 98 % of: copy of random tokens 90.0 % (plain fine-tuning × "
        "1: 50.0 %). The 95 % interval excludes 98 % in 1 of 1 cases.\n" in block
    )
    assert "which are left out: ROT13 27.5 % (chance 25.0 %)." in block
    assert "513 to 1,024: `holdfast` 96.2 %, plain fine-tuning × 1 50.0 %." in block
    assert "| | pretrained, % | chance, % | holdfast | plain fine-tuning × 1 | LoRA × 6 |" in block
    assert "SmolLM2-135M learns GSM8K" in block
    assert "| GSM8K, learned | — | — | 90.0 | 100.0 | 50.0 |" in block
    assert (
        "| copy of random tokens | 100.0 | 0.0 | 90.0<br>(80.0&nbsp;to&nbsp;97.5) | 50.0" in block
    )
    visible, hidden = block.split("<details markdown>")
    assert "| WikiText-2, tokens 513 to 1,024 | 2.500 | 96.2<br>" in hidden
    assert "| harmful requests, refused | 80.0 | 80.0 | 40.0 | 60.0 |" in hidden
    assert "harmful" not in visible
    assert "poem" not in block  # no tuned model took this test


def test_abilities_that_are_all_kept_or_all_at_chance(tmp_path, page):
    runs = ability_runs()
    runs[1]["points"]["tuned"] |= {"copy": 1.0}
    block = page(write(tmp_path, abilities=runs))["proof_limits"]
    assert "or more, of 3: holdfast 3," in block
    assert "keeps less than" not in block
    for run in runs[1:]:
        for test in ("copy", "refusals", "lookup"):
            del run["points"]["tuned"][test]
        run["shares"] = {}
    runs[0]["left_out"] = ["copy", "refusals", "lookup", "rot13"]
    block = page(write(tmp_path, abilities=runs))["proof_limits"]
    assert "of 0 tests" not in block
    assert "learned |" not in block
    assert "left out: copy of random tokens 100.0 %" in block


def test_right_answers_are_in_the_table(tmp_path, page):
    runs = language_runs()
    for error, certain in ((0.04, "none"), (0.01, "SmolLM2-135M, GSM8K")):
        for run in runs:
            right = {"pretrained": 0.1, "holdfast": 0.25}.get(run["plan"], 0.3)
            for point in run["points"].values():
                point |= {"written": right, "written_se": error, "written_ended": 1.0}
        told = page(write(tmp_path, smollm2_gsm8k=runs))["proof_verdict"]
        assert f"more than two standard errors in {certain}." in told
    assert " | 10.0 / 30.0 / 25.0 | " in told
    assert "fewer right answers than after plain fine-tuning in 1 of 1 settings" in told


def test_a_saturated_base_is_judged_and_not_counted(tmp_path, page):
    plans = ("pretrained", "plain-x1", "plain-x2", "holdfast")
    runs = [run for run in language_runs() if run["plan"] in plans]
    for run in runs:
        for merged, right in {"base": 0.6, "tuned": 0.625}.items():
            if merged in run["points"]:
                run["points"][merged] |= {"written": right, "written_ended": 0.9}
        run["points"].pop("wise-ft-0.5", None)
    found = write(tmp_path, **{"qwen-0.5b_mbpp": runs})
    assert (found["settings"], found["unfinished"], found["missing"]) == ({}, {}, {})
    blocks = page(found)
    assert "not been run yet" in blocks["proof_verdict"]
    block = blocks["proof_limits"]
    assert block.startswith("## A base close to saturation\n")
    assert "Qwen2.5-Coder-0.5B learns MBPP" in block
    assert "not one of the 14 of the claim, and is not counted." in block
    assert "answers: 2.000 (60.0 %) before, 1.000 (62.5 %) after plain fine-tuning × 1," in block
    assert "`holdfast` learns 100.0 % of the gain of the best of plain." in block
    assert "keeps 99.7 % in the mean (WikiText-2 99.3 % least), the best of plain 87.5 %." in block
    assert "Points of plain fine-tuning that dominate `holdfast`: 0 of 2." in block
    assert "gain of the best of plain. The best learning rate of plain fine-tuning is the" in block
    assert "Qwen2.5-Coder-0.5B, MBPP: all tests and all points" in block
    for run in runs:  # of no seed did they stop at the end
        if run["plan"] == "holdfast":
            del run["points"]["tuned"]["written_ended"]
    block = page(write(tmp_path, **{"qwen-0.5b_mbpp": runs}))["proof_limits"]
    assert "1.000 (62.5 %) after plain fine-tuning × 1," in block
    assert "(— %) after `holdfast`" in block
    for run in runs[1:]:
        run["points"]["tuned"] |= {"choose_nll": 2.1, "report_nll": 2.1}
    found = write(tmp_path, missing=["plain-x0.5-s0"], **{"qwen-0.5b_mbpp": runs})
    block = page(found)["proof_limits"]
    assert "The best of plain fine-tuning gains nothing" in block
    assert "not counted. Missing runs: plain-x0.5-s0." in block
    assert found["saturated"]["qwen-0.5b_mbpp"]["points"][0]["target"] == 0


def test_all_blocks_and_pictures(tmp_path, page):
    pictures = load("proof_pictures")
    found = write(
        tmp_path, smollm2_gsm8k=language_runs(), minilm_rte=encoder_runs(),
        ablations=[
            *ablation_runs(), language_runs()[5] | {"plan": "default"}, rate_run(2, 1.0, 3.0)
        ],
        continual=continual_runs(), abilities=ability_runs(),
    )  # fmt: skip
    blocks = page(found)
    assert all(blocks.values())
    assert "At worst it learned 75.0 % (MiniLM-L6, RTE; 95 % inter" in blocks["proof_headline"]
    assert (
        "in **1 of 2 settings**; by the 95 % intervals, it is certain" in blocks["proof_headline"]
    )
    assert "(img/proof-headline.svg)" in blocks["proof_headline"]
    assert (
        "These are 2 of the 14 settings of the protocol, with 1 to 3 seeds"
        in blocks["proof_headline"]
    )
    assert "The least learned is 90.0 % (strength 3)" in blocks["proof_ablations"]
    left = "had learned of GSM8K (medians over seeds): holdfast 75.0 % (75.0 %). Nothing means"
    assert left in blocks["proof_continual"]
    medians = blocks["proof_medians"].splitlines()
    assert medians[2].startswith("| | all 2 settings | 1 language models | 1 encoders and")
    ours = "| `holdfast`, at its defaults | 87.5 % / 99.8 % | 100.0 % / 99.7 % | 75.0 % / 100.0 % |"
    assert medians[4].startswith(ours)
    assert medians[4].endswith("| 75.0 % / 99.7 % | 1 | 1 |")  # RTE has one seed
    missed = blocks["proof_misses"]
    assert "In 1 of 2 settings `holdfast` misses 99/99: in 1 it learns less, in 0" in missed
    assert "| MiniLM-L6, RTE | 75.0 / 100.0 | — | Mostly noise: 138 rows" in missed
    edge = "learning rate of plain fine-tuning is the lowest that was run in SmolLM2-135M, GSM8K."
    assert edge in blocks["proof_verdict"]
    assert len(pictures.stale(found, tmp_path)) == 6
    pictures.draw(found, tmp_path)
    assert pictures.stale(found, tmp_path) == []
    drawn = {name: (tmp_path / f"{name}.svg").read_text() for name in pictures.PICTURES}
    assert "99 / 99" in drawn["proof-all"]
    assert "STS-B" in drawn["proof-tests"]
    assert "MiniLM-L6, RTE" in drawn["proof-equal-target"]
    assert "strength (default 1)" in drawn["proof-ablations"]
    assert "GSM8K" in drawn["proof-continual"]
    gone = found | {"continual": []}
    assert pictures.stale(gone, tmp_path) == ["proof-continual.svg"]
    pictures.draw(gone, tmp_path)
    assert not (tmp_path / "proof-continual.svg").exists()


def test_points_that_learn_more_than_the_picture_shows_are_counted(tmp_path, page):
    runs = language_runs()
    runs[3]["points"]["tuned"] = texts(0.8, 3.0)  # LoRA learns 120 %
    told = page(write(tmp_path, smollm2_boolq=runs))["proof_all"]
    assert told.endswith("Points outside the picture: 2.")


def test_the_other_rule_and_both_edges_are_told(tmp_path, page):
    runs = language_runs()
    runs[2]["points"]["tuned"] |= {
        "choose_nll": 0.9
    }  # plain × 2 is better on the rows to choose on
    blocks = page(write(tmp_path, smollm2_gsm8k=[*runs, runs[1] | {"seed": 1}]))
    assert (
        "with any number of seeds, plain fine-tuning keeps 70.0 % in the median, `holdfast` learns "
        "125.0 %, and 99/99 is reached in 1 of 1. " in blocks["proof_headline"]
    )
    told = blocks["proof_verdict"]
    assert "is the lowest that was run in SmolLM2-135M, GSM8K." in told
    told = page(write(tmp_path, smollm2_gsm8k=runs))["proof_verdict"]
    assert "is the highest that was run in SmolLM2-135M, GSM8K." in told


def test_the_page_names_scripts_that_exist():
    text = (PROOF.parents[1] / "docs" / "results.md").read_text(encoding="utf-8")
    commands = re.findall(r"^python (\w+\.py)", text.partition("## How to reproduce")[2], re.M)
    assert len(commands) >= 3
    assert all((PROOF / name).is_file() for name in commands)


def test_a_share_is_not_rounded_up_to_a_goal():
    percent = load("_proof_text").percent
    assert [percent(x) for x in (98.94, 98.96, 98.9996, 99.0, 97.99)] == [
        "98.9", "98.96", "98.9996", "99.0", "97.99",
    ]  # fmt: skip
