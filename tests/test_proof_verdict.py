"""The verdict of the proof: measures by hand, and the bootstrap by closed forms."""

import doctest
import math

import numpy as np
import pytest
from scipy import stats

from proof_runs import (
    PROOF,
    ability_runs,
    ablation_runs,
    by_point,
    continual_runs,
    encoder_runs,
    language_runs,
    load,
    texts,
    write,
)

pytestmark = pytest.mark.usefixtures("proof_scripts")


def test_examples():
    assert doctest.testmod(load("verdict")).failed == 0


def test_the_verdict_of_a_language_model(tmp_path):
    setting = write(tmp_path, smollm2_boolq=language_runs())["settings"]["smollm2_boolq"]
    rows = by_point(setting)
    ours = rows["holdfast", "tuned"]
    assert setting["best_plain"] == "plain-x1"
    assert (ours["target"], ours["seeds"]) == (100, 3)
    assert ours["kept"] == pytest.approx({"wikitext_nll": 300 / 3.02, "piqa": 100})
    assert ours["perplexity"] == pytest.approx({"wikitext_nll": 100 * math.exp(-0.02)})
    assert ours["mean_kept"] == pytest.approx((300 / 3.02 + 100) / 2)
    assert ours["worst"] == "wikitext_nll"
    assert setting["reached"] == {"99": "strictly", "98": "strictly"}
    # Losses are the same for all tokens, so only the seeds vary: 1.02, 1.0 and 0.99.
    assert ours["target_interval"] == pytest.approx([98, 101], abs=1e-3)
    assert ours["kept_interval"] == pytest.approx([ours["mean_kept"]] * 2, abs=1e-3)
    # LoRA learns as much and keeps more. The draw of seeds decides whether it learns more.
    assert rows["lora-x1", "tuned"]["dominates"] == "yes"
    assert rows["lora-x1", "tuned"]["target_ahead"] == pytest.approx([-1, 2], abs=1e-3)
    assert rows["plain-x1", "tuned"]["dominates"] == "no"
    equal = setting["equal_target"]
    assert equal["plain"] == pytest.approx((75 + 100) / 2)
    assert equal["plain+wise-ft"] is None
    assert equal["lora"] == 100


def test_one_that_is_better_in_every_resample_dominates_clearly(tmp_path):
    runs = language_runs()
    runs[3]["points"]["tuned"] = texts(0.98, 3.0)
    setting = write(tmp_path, smollm2_boolq=runs)["settings"]["smollm2_boolq"]
    rows = by_point(setting)
    assert rows["lora-x1", "tuned"]["dominates"] == "clearly"
    assert rows["rehearsal-x1", "tuned"]["dominates"] == "yes"


def test_a_model_that_diverged_is_the_worst(tmp_path):
    runs = language_runs()
    runs.insert(1, {"plan": "plain-x9", "seed": 0, "points": {"tuned": texts(*[math.nan] * 2, 0)}})
    setting = write(tmp_path, smollm2_boolq=runs)["settings"]["smollm2_boolq"]
    assert setting["best_plain"] == "plain-x1"
    row = by_point(setting)["plain-x9", "tuned"]
    assert (row["target"], row["kept"]["wikitext_nll"], row["dominates"]) == (-9800, 3, "no")
    assert row["kept_interval"] == pytest.approx([row["mean_kept"]] * 2, abs=1e-3)


def test_the_verdict_of_an_encoder(tmp_path):
    setting = write(tmp_path, minilm_rte=encoder_runs())["settings"]["minilm_rte"]
    rows = by_point(setting)
    assert rows["holdfast", "tuned"]["target"] == pytest.approx(75)  # (80 − 50) / (90 − 50)
    assert rows["plain-0.0001", "tuned"]["mean_kept"] == -100
    merged = rows["plain-0.0001", "wise-ft-0.5"]
    assert (merged["target"], merged["row"]) == (pytest.approx(50), "plain+wise-ft")
    assert rows["holdfast", "tuned"]["kept_interval"] == pytest.approx([100, 100])
    assert setting["reached"] == {"99": "no", "98": "no"}
    assert setting["equal_target"] == {"plain": -100, "plain+wise-ft": None}


def shares(p, rows=4000):
    """A setting of image models: ``holdfast`` is right with this probability, the base with 0.9."""
    pack, random = load("_samples").pack, np.random.default_rng(0)
    level = random.random(rows)

    def point(p):
        right = level < p
        samples = {"target_report": pack(right), "imagenet": pack(right)}
        share = float(right.mean())
        found = {"target_choose": share, "target_report": share, "imagenet": share}
        return found | {"samples": samples}

    base = point(0.9)
    runs = [
        {
            "plan": "pretrained", "points": {"base": base}, "metric": "accuracy",
            "chance": {"target_choose": 0.0, "target_report": 0.0, "imagenet": 0.0},
            "rows": {"report": rows, "imagenet": rows},
        },
        {"plan": "plain-1", "family": "plain", "seed": 0, "points": {"tuned": point(0.8)}},
        {"plan": "holdfast", "family": "holdfast", "seed": 0, "points": {"tuned": point(p)}},
    ]  # fmt: skip
    merged = {name: value for name, value in point(p).items() if name != "samples"}
    runs[1]["points"]["wise-ft-0.5"] = merged
    return load("_measures").Setting(runs)


def test_the_bootstrap_has_the_standard_errors_of_theory():
    """Tolerances are four standard errors of a standard deviation from 2,000 resamples."""
    bootstrap = load("_bootstrap").Bootstrap(setting := shares(0.7))
    p, before = (setting.figures("holdfast", "tuned", 0)["imagenet"], setting.base["imagenet"])
    figures = bootstrap.figures["holdfast", "tuned", "imagenet"][:, 0]
    assert figures.mean() == pytest.approx(p, abs=4 * float(figures.std()) / math.sqrt(2000))
    assert figures.std() == pytest.approx(math.sqrt(p * (1 - p) / 4000), rel=0.07)
    # Both sides have the same samples, and the base is right wherever holdfast is. So the number
    # that both have right is binomial, with the share p / before of those that the base has right.
    ratio = 100 * p / before
    paired = ratio * math.sqrt((1 - p / before) / (p * 4000))
    assert bootstrap.measures("holdfast").mean_kept.std() == pytest.approx(paired, rel=0.07)
    # A merged model has no samples: it varies on its own, and differences are wider.
    ahead = bootstrap.measures("plain-1", "wise-ft-0.5").mean_kept
    ahead = ahead - bootstrap.measures("holdfast").mean_kept
    error = math.sqrt(p * (1 - p) / 4000)
    alone = (100 * error / before) ** 2
    assert ahead.std() == pytest.approx(math.sqrt(2 * alone), rel=0.1)
    assert abs(ahead.mean()) < 0.2


def test_seeds_are_drawn_with_replacement():
    """Of three seeds, the middle one is the median in 13 of 27 draws."""
    setting = load("_measures").Setting(language_runs())
    bootstrap = load("_bootstrap").Bootstrap(setting)
    targets = bootstrap.measures("holdfast").target.round(2)
    found = [float((targets == share).mean()) for share in (98, 100, 101)]
    assert found == pytest.approx([7 / 27, 13 / 27, 7 / 27], abs=0.04)


def test_resampled_correlations_are_those_of_the_repeated_rows():
    bootstrap, random = load("_bootstrap"), np.random.default_rng(0)
    labels, values = random.integers(5, size=30) / 1.0, random.integers(9, size=(30, 2)) / 1.0
    counts = np.stack([np.bincount(random.integers(30, size=30), minlength=30) for _ in range(4)])
    counts = counts.astype(np.float32)
    found = bootstrap.correlations(labels, counts, values)
    right, yes = values > 4, labels > 2
    other = bootstrap.matthews(yes, counts, right.astype(np.float32))
    for i, j in np.ndindex(found.shape):
        rows = np.repeat(np.arange(30), counts[i].astype(int))
        wanted = stats.spearmanr(values[rows, j], labels[rows])[0]
        assert found[i, j] == pytest.approx(wanted, abs=1e-5)
        said = right[:, j] == yes
        assert other[i, j] == pytest.approx(np.corrcoef(said[rows], yes[rows])[0, 1], abs=1e-5)


def test_ablations_and_tasks_in_a_row(tmp_path):
    found = write(
        tmp_path, smollm2_gsm8k=language_runs(), ablations=ablation_runs(),
        continual=continual_runs(),
    )  # fmt: skip
    (changed,) = found["ablations"]
    assert (changed["plan"], changed["target"], changed["mean_kept"]) == ("strength-3", 90, 100)
    (ours,) = found["continual"]
    first, last = ours["stages"]
    assert (ours["plan"], ours["seeds"]) == ("holdfast", 3)
    assert first == {
        "task": "gsm8k", "loss": 1.0, "mean_kept": 100, "least_kept": 100, "tasks": {"gsm8k": 100},
    }  # fmt: skip
    # Of the 1 nat that was learned of GSM8K, 0.75 are left in the median.
    assert last["tasks"] == {"gsm8k": 75, "mbpp": 100}
    assert (last["mean_kept"], last["loss"]) == (75, 1.5)


def test_models_without_samples_vary_independently():
    """Those of papers' runs have neither samples nor recorded errors, also not the base."""
    runs = encoder_runs()
    runs[0]["rows"] |= {"report": 1000, "stsb": 1000}
    for run in runs:
        for point in run["points"].values():
            point.pop("samples", None)
            point["stsb"] = 0.8
    bootstrap = load("_bootstrap").Bootstrap(load("_measures").Setting(runs))
    low, high = bootstrap.kept("holdfast")["stsb"]
    # Both the base and the tuned model have the standard error 0.36 / √999, 1.4 % of 0.8.
    assert high - low == pytest.approx(100 * 2 * 1.96 * math.sqrt(2) * 0.0114 / 0.8, rel=0.1)


def test_the_best_of_plain_is_one_with_the_most_seeds():
    runs = encoder_runs()
    further = [
        run | {"seed": seed} for run in runs if run["plan"] != "pretrained" for seed in (1, 2)
    ]
    (plain,) = (run for run in runs if run["plan"] == "plain-0.0001")
    lucky = plain["points"]["tuned"] | {"target_choose": 1.0}
    lucky = plain | {"plan": "plain-1e-05", "points": {"tuned": lucky}}
    setting = load("_measures").Setting
    assert setting([*runs, lucky]).best_plain == "plain-1e-05"
    found = setting([*runs, *further, lucky])
    assert (found.best_plain, found.best_plain_of_any_seeds) == ("plain-0.0001", "plain-1e-05")
    equal = {**plain, "plan": "plain-0.0005"}
    assert setting([*runs, equal]).best_plain == "plain-0.0001"  # the first, and so the lowest


def test_figures_by_the_first_rule_are_those_beside_the_best_of_any_seeds(tmp_path):
    runs = language_runs()
    better = {"plan": "plain-x0.5", "seed": 0, "points": {"tuned": texts(0.8, 3.1)}}
    twice = runs[1] | {"seed": 1}
    found = write(tmp_path, smollm2_boolq=[*runs, better, twice])["settings"]["smollm2_boolq"]
    assert found["best_plain"] == "plain-x1"
    rule = found["of_any_seeds"]
    assert (rule["best_plain"], rule["reached"]) == ("plain-x0.5", "no")
    assert rule["target"] == pytest.approx(100 / 1.2)  # holdfast learns 1 nat, this one 1.2
    assert rule["plain_kept"] == pytest.approx((300 / 3.1 + 100) / 2)


def test_the_tests_of_abilities(tmp_path):
    tested = write(tmp_path, abilities=ability_runs())["abilities"]["abilities"]
    rows = {row["plan"]: row for row in tested["points"]}
    ours = rows["holdfast"]
    assert (ours["target"], tested["left_out"]) == (pytest.approx(90), ["rot13"])
    assert ours["kept"] == pytest.approx({
        "copy": 90, "refusals": 100, "lookup": 100, "wikitext_0_nll": 100,
        "wikitext_512_nll": 250 / 2.6,
    })  # fmt: skip
    assert rows["plain-x1"]["kept"]["refusals"] == pytest.approx(50)  # (0.7 − 0.5) / (0.9 − 0.5)
    assert rows["lora-x6"]["kept"]["lookup"] == pytest.approx(200)
    # The base has all copies right, so the share kept is that of a binomial.
    copies = [2.5 * stats.binom.ppf(p, 40, 0.9) for p in (0.025, 0.975)]
    assert ours["kept_intervals"]["copy"] == pytest.approx(copies) == [80, 97.5]
    # Both answer the same rows rightly. Resamples with the base at chance or below are left out.
    assert ours["kept_intervals"]["lookup"] == pytest.approx([100, 100], abs=1e-3)


def test_changed_results_make_the_verdict_stale(tmp_path):
    write(tmp_path, minilm_rte=encoder_runs())
    verdict = load("verdict")
    assert not verdict.stale(tmp_path)
    file = tmp_path / "minilm_rte.json"
    file.write_text(file.read_text().replace("2026-01-01", "2026-01-02"))
    assert verdict.stale(tmp_path)


def test_changed_measures_make_the_verdict_stale(tmp_path, monkeypatch):
    write(tmp_path, minilm_rte=encoder_runs())
    verdict, changed = load("verdict"), tmp_path / "_measures.py"
    changed.write_text((PROOF / "_measures.py").read_text() + "\n")
    others = [file for file in verdict.CODE if file.name != changed.name]
    monkeypatch.setattr(verdict, "CODE", [*others, changed])
    assert len(others) == 3
    assert verdict.stale(tmp_path)


def test_an_encoder_whose_pairs_are_all_alike_keeps_nothing(tmp_path):
    runs = encoder_runs()
    points = runs[1]["points"]
    points["tuned"]["samples"]["stsb"] = load("_samples").pack_numbers(np.full(20, 0.5))
    points["tuned"]["stsb"] = points["wise-ft-0.5"]["stsb"] = math.nan
    rows = by_point(write(tmp_path, minilm_rte=runs)["settings"]["minilm_rte"])
    tuned, merged = rows["plain-0.0001", "tuned"], rows["plain-0.0001", "wise-ft-0.5"]
    assert (tuned["mean_kept"], tuned["kept_interval"], tuned["dominates"]) == (0, [0, 0], "no")
    assert merged["mean_kept"] == 0
    assert merged["kept_interval"][0] < 0 < merged["kept_interval"][1] < 60


def test_a_merge_that_not_all_seeds_have(tmp_path):
    more = {"plan": "plain-x1", "seed": 1, "points": {"tuned": texts(1.0, 4.0)}}
    setting = write(tmp_path, smollm2_boolq=[*language_runs(), more])["settings"]["smollm2_boolq"]
    rows = by_point(setting)
    assert [rows["plain-x1", merged]["seeds"] for merged in ("tuned", "wise-ft-0.5")] == [2, 1]
    first, later = language_runs()[1], {**language_runs()[1], "seed": 1}
    bare = {**first, "points": {"tuned": first["points"]["tuned"]}}
    others = [run for run in language_runs() if run["plan"] != "plain-x1"]
    setting = write(tmp_path, smollm2_boolq=[*others, bare, later])["settings"]["smollm2_boolq"]
    rows = by_point(setting)
    assert [rows["plain-x1", merged]["seeds"] for merged in ("tuned", "wise-ft-0.5")] == [2, 1]
    assert rows["plain-x1", "wise-ft-0.5"]["figures"]["report_nll"] == 1.5
