"""What the page of the proof says of ``holdfast`` at other learning rates than its default."""

import pytest

from proof_runs import ablation_runs, encoder_runs, language_runs, load, rate_run, texts, write

pytestmark = pytest.mark.usefixtures("proof_scripts")


def rate_runs():
    """Of × 0.5, 2 and 4, the second learns and keeps more than the default."""
    return [rate_run(0.5, 1.02, 3.0), rate_run(2, 0.98, 3.0), rate_run(4, 0.9, 6.0)]


@pytest.fixture
def block(monkeypatch):
    """The block for a verdict."""

    def made(found):
        monkeypatch.setattr(load("verdict"), "read", lambda: found)
        return load("_proof_rates").proof_rates()

    return made


def encoder_rate(times):
    """At this multiple, ``holdfast`` learns as much as plain fine-tuning and keeps everything."""
    _, plain, ours = encoder_runs()
    learned, kept = plain["points"]["tuned"], ours["points"]["tuned"]
    point = learned | {"stsb": kept["stsb"], "samples": learned["samples"] | kept["samples"]}
    point["samples"]["target_report"] = learned["samples"]["target_report"]
    plan = f"rate-x{times:g}"
    return {"plan": plan, "family": "rate", "seed": 0, "points": {"tuned": point}}


def points(**of):
    """Points by multiple, from what is learned and kept."""
    point = load("_measures").Point
    names = {"half": "× 0.5", "default": "× 1", "twice": "× 2"}
    return {
        names[name]: point("", "", "", 1, target, kept, {"piqa": kept}, {})
        for name, (target, kept) in of.items()
    }


def test_no_runs_at_other_learning_rates_are_no_block(tmp_path, block):
    found = write(tmp_path, smollm2_gsm8k=language_runs(), ablations=ablation_runs())
    assert block(found) == ""


def test_all_multiples_of_each_setting_are_shown_and_counted(tmp_path, block):
    runs = [run | {"lr": 0.00022} for run in [*language_runs(), *rate_runs()[:2]]]
    found = write(
        tmp_path, smollm2_boolq=runs, smollm2_mbpp=language_runs(),
        minilm_rte=[*encoder_runs(), encoder_rate(2), encoder_rate(4)],
    )  # fmt: skip
    text = block(found)
    assert text.startswith("## Is it the method or its learning rate?\n\n`holdfast` also ran at ")
    assert "at 0.5, 2 and 4 times its default learning rate, with one seed, in 2 of 3 set" in text
    assert "In 1 of 2, one of these multiples reaches 99/99 where the default does not: " in text
    assert "not: MiniLM-L6, RTE (× 2 and × 4). In 1 of 2, another multiple is more than" in text
    assert "at most): MiniLM-L6, RTE at × 2 100.0 instead of 75.0. There the default" in text
    assert (
        "| SmolLM2-135M, BoolQ | 0.00022 | 98.0 / 100.0 | 100.0 / 99.7 | 102.0 / 100.0 | — |"
        in (text)
    )
    assert "| MiniLM-L6, RTE | — | — | 75.0 / 100.0 | 100.0 / 100.0 | 100.0 / 100.0 |" in text
    assert "MBPP" not in text


def test_the_setting_of_the_ablations_has_their_runs_and_its_own_default(tmp_path, block):
    default = {"plan": "default", "seed": 0, "points": {"tuned": texts(0.5, 3.0)}}
    ablations = [*ablation_runs(), default, *rate_runs()[::2]]
    settings = {"smollm2_gsm8k": language_runs(), "smollm2_boolq": language_runs()}
    text = block(write(tmp_path, ablations=ablations, **settings))
    assert "with one seed, in 1 of 2 settings." in text  # not those of BoolQ
    assert "| SmolLM2-135M, GSM8K | — | 98.0 / 100.0 | 100.0 / 99.7 | — | 110.0 / 75.0 |" in text
    assert "In 0 of 1, one of these multiples reaches 99/99 where the default does not. In" in text
    assert "In 0 of 1, another multiple is more than a point closer" in text
    assert "100 at most). The multiples are chosen" in text


def test_other_multiples_that_reach_the_goal_count_if_the_default_does_not():
    others = load("_proof_rates").only_others_reach
    assert others(points(half=(99, 99.5), default=(100, 98), twice=(99, 98.99))) == ["× 0.5"]
    assert others(points(half=(100, 100), default=(99, 99))) == []


def test_a_multiple_is_much_closer_if_its_lower_share_is_a_point_higher():
    much_closer = load("_proof_rates").much_closer
    assert much_closer(points(half=(98.5, 100), default=(97, 99), twice=(99, 98.2))) == "× 0.5"
    assert much_closer(points(half=(96, 100), default=(97, 97), twice=(120, 96))) == ""
    assert much_closer(points(half=(98, 98), default=(97, 100))) == ""  # by no more than a point
    assert much_closer(points(default=(101, 100), twice=(104, 100))) == ""  # equally close


def test_these_points_are_listed_with_their_multiple_and_a_note(tmp_path):
    settings = write(tmp_path, smollm2_boolq=[*language_runs(), *rate_runs()])["settings"]
    text = load("_proof_details").details("smollm2_boolq", settings["smollm2_boolq"], {})
    row = "| `holdfast` at another learning rate | × 2 | | 1 | 102.0 | 100.0 | WikiText-2 100.0 | +"
    assert row in text
    assert "- *`holdfast` at another learning rate*: × here: times its default" in text


def drawn(settings):
    """The places of all points and lines of the pictures of these settings."""
    pictures = load("proof_pictures")
    makes = [make for make, field in pictures.PICTURES.values() if field == "settings"]
    with load("_drawing").drawing() as plt:
        axes = [axes for make in makes for axes in make(plt, settings).axes]
        return [[line.get_xydata().tolist() for line in one.lines] for one in axes]


def test_the_pictures_leave_these_points_out(tmp_path):
    without = drawn(write(tmp_path, smollm2_boolq=language_runs())["settings"])
    found = write(tmp_path, smollm2_boolq=[*language_runs(), *rate_runs()])["settings"]
    assert "rate" not in found["smollm2_boolq"]["equal_target"]
    assert drawn(found) == without
    assert all(without)


def test_a_row_that_the_pictures_do_not_know_is_drawn_as_another_method(tmp_path):
    unknown = {"plan": "unheard-x1", "seed": 0, "points": {"tuned": texts(1.0, 3.0)}}
    before = drawn(write(tmp_path, smollm2_boolq=language_runs())["settings"])
    found = write(tmp_path, smollm2_boolq=[*language_runs(), unknown])["settings"]
    more = [len(new) - len(old) for new, old in zip(drawn(found), before, strict=True)]
    assert more == [0, 1, 0, 1]
    assert load("proof_pictures").look("unheard")[2] == "other methods"
