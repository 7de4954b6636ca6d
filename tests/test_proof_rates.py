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


def rows(**of):
    """Rows by multiple, from what is learned and kept and the lower ends of what they are ahead."""
    names = {"half": "× 0.5", "default": "× 1", "twice": "× 2"}

    def row(target, kept, target_ahead=0.1, kept_ahead=0.1):
        ahead = {"target_ahead": [target_ahead, 9.0], "kept_ahead": [kept_ahead, 9.0]}
        return {"target": target, "mean_kept": kept} | ahead

    return {names[name]: row(*figures) for name, figures in of.items()}


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
    assert "at 0.5, 2 and 4 times its default learning rate, in 2 of 3 settings." in text
    # With seed 0, `holdfast` learns 98 % in BoolQ, and × 2 reaches 102 %.
    assert "In 2 of 2, one of these multiples reaches 99/99 where the default does not: " in text
    assert "not: SmolLM2-135M, BoolQ (× 2); MiniLM-L6, RTE (× 2 and × 4)." in text
    assert "In 1, one of them is nearer to it, and the 95 % interval of the difference" in text
    assert "BoolQ, × 2: 102.0 / 100.0 instead of 98.0 / 99.7. The multiples are chosen" in text
    row = "0.00022 | 98.0 / 100.0 | 98.0 / 99.7 | 102.0 / 100.0 | — | 100.0 / 99.7 |"
    assert f"| SmolLM2-135M, BoolQ | {row}" in text
    row = "75.0 / 100.0 | 100.0 / 100.0 | 100.0 / 100.0 | 75.0 / 100.0 |"
    assert f"| MiniLM-L6, RTE | — | — | {row}" in text
    assert "MBPP" not in text


def test_the_setting_of_the_ablations_has_their_runs(tmp_path, block):
    """Also their default, which is the run that the others differ from in nothing else."""
    default = {"plan": "default", "seed": 0, "points": {"tuned": texts(1.0, 3.0)}}
    ablations = [*ablation_runs(), default, *rate_runs()[::2]]
    settings = {"smollm2_gsm8k": language_runs(), "smollm2_boolq": language_runs()}
    text = block(write(tmp_path, ablations=ablations, **settings))
    assert "learning rate, in 1 of 2 settings." in text  # not those of BoolQ
    row = "98.0 / 100.0 | 100.0 / 100.0 | — | 110.0 / 75.0 | 100.0 / 99.7 |"
    assert f"| SmolLM2-135M, GSM8K | — | {row}" in text
    assert "None of these multiples reaches 99/99 where the default does not. None is" in text


def test_what_the_multiples_are_ahead_is_paired_with_the_same_seed(tmp_path):
    found = write(tmp_path, smollm2_boolq=[*language_runs(), *rate_runs()])["rates"]
    default, half, twice, _ = found["smollm2_boolq"]
    assert (default["plan"], default["seeds"]) == ("holdfast", 1)
    assert "target_ahead" not in default
    # × 0.5 learns what seed 0 learns, and × 2 four points more, in every resample.
    assert half["target_ahead"] == pytest.approx([0, 0], abs=1e-6)
    assert twice["target_ahead"] == pytest.approx([4, 4], abs=1e-6)


def test_other_multiples_that_reach_the_goal_count_if_the_default_does_not():
    others = load("_proof_rates").only_others_reach
    assert others(rows(half=(99, 99.5), default=(100, 98), twice=(99, 98.99))) == ["× 0.5"]
    assert others(rows(half=(100, 100), default=(99, 99))) == []


def test_a_multiple_is_nearer_if_it_is_surely_ahead_in_what_the_default_lacks():
    nearest = load("_proof_rates").nearest
    assert nearest(rows(half=(98.5, 100), default=(97, 99), twice=(99, 98.2))) == "× 0.5"
    assert nearest(rows(half=(98.5, 100, 0.0), default=(97, 99), twice=(99, 98.2))) == "× 2"
    assert nearest(rows(half=(98.5, 100, 0.0, 1.0), default=(97, 99))) == "× 1"
    assert nearest(rows(half=(96, 100), default=(97, 97.5), twice=(120, 96))) == "× 1"


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
