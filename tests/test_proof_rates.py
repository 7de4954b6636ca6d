"""``holdfast`` at other learning rates than its default, in the verdict and in the pictures."""

import pytest

from proof_runs import ablation_runs, language_runs, load, rate_run, texts, write

pytestmark = pytest.mark.usefixtures("proof_scripts")


def rate_runs():
    """Of × 0.5, 2 and 4, the second learns and keeps more than the default."""
    return [rate_run(0.5, 1.02, 3.0), rate_run(2, 0.98, 3.0), rate_run(4, 0.9, 6.0)]


def test_only_settings_with_runs_at_other_learning_rates_have_rows(tmp_path):
    """The ablations have those of their setting, and the default that differs in nothing else."""
    default = {"plan": "default", "seed": 0, "points": {"tuned": texts(1.0, 3.0)}}
    ablations = [*ablation_runs(), default, *rate_runs()[::2]]
    settings = {"smollm2_gsm8k": language_runs(), "smollm2_boolq": language_runs()}
    assert write(tmp_path, ablations=ablation_runs(), **settings)["rates"] == {}
    found = write(tmp_path, ablations=ablations, **settings)["rates"]
    assert [*found] == ["smollm2_gsm8k"]
    both = {row["plan"]: (row["target"], row["mean_kept"]) for row in found["smollm2_gsm8k"]}
    assert both == {"holdfast": (100, 100), "rate-x0.5": (98, 100), "rate-x4": (110, 75)}


def test_what_the_multiples_are_ahead_is_paired_with_the_same_seed(tmp_path):
    found = write(tmp_path, smollm2_boolq=[*language_runs(), *rate_runs()])["rates"]
    default, half, twice, _ = found["smollm2_boolq"]
    assert (default["plan"], default["seeds"]) == ("holdfast", 1)
    assert "target_ahead" not in default
    # × 0.5 learns what seed 0 learns, and × 2 four points more, in every resample.
    assert half["target_ahead"] == pytest.approx([0, 0], abs=1e-6)
    assert twice["target_ahead"] == pytest.approx([4, 4], abs=1e-6)


def test_opponents_are_without_these_points(tmp_path):
    found = write(tmp_path, smollm2_boolq=[*language_runs(), *rate_runs()])["settings"]
    assert "rate" not in found["smollm2_boolq"]["equal_target"]
    verdict = load("verdict")
    assert "rate" not in {row["row"] for row in verdict.opponents(found["smollm2_boolq"])}
