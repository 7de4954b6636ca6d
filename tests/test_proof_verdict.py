"""The verdict of the proof: measures by hand, the bootstrap by closed forms, missing results."""

import doctest
import importlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

PROOF = Path(__file__).parents[1] / "benchmarks" / "proof"
TOKENS = [1, 2, 3, 4]  # of the requests of a text


@pytest.fixture(autouse=True)
def scripts(monkeypatch):
    folders = [PROOF, PROOF.parent / "papers", PROOF.parent]
    monkeypatch.setattr(sys, "path", [*map(str, folders), *sys.path])


def load(name):
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["_proof_text", "_proof_tables"])
def test_examples(name):
    assert doctest.testmod(load(name)).failed == 0


def texts(report, wikitext, right=10, *, whole=True):
    """A point of a language model: losses that are the same for every token, 10 rows of PIQA."""
    figures = {"choose_nll": report, "report_nll": report, "wikitext_nll": wikitext}
    figures |= {f"{name}_se": 0.0 for name in figures} | {"piqa": right / 10, "piqa_se": 0.0}
    losses = {"choose": report, "report": report, "wikitext": wikitext}
    samples = {name: [loss * n for n in TOKENS] for name, loss in losses.items()}
    samples["piqa"] = load("_samples").pack([i < right for i in range(10)])
    return figures | ({"samples": samples} if whole else {})


def language_runs():
    """The best of plain learns 1 nat, and ``holdfast`` as much in the median."""
    sizes = {"choose": TOKENS, "report": TOKENS, "wikitext": TOKENS, "piqa": 10}
    plain = {"tuned": texts(1.0, 4.0), "wise-ft-0.5": texts(1.5, 3.0, whole=False)}
    return [
        {"plan": "pretrained", "points": {"base": texts(2.0, 3.0) | {"sizes": sizes}}},
        {"plan": "plain-x1", "seed": 0, "points": plain},
        {"plan": "plain-x2", "seed": 0, "points": {"tuned": texts(1.2, 5.0, 9)}},
        {"plan": "lora-x1", "seed": 0, "points": {"tuned": texts(1.0, 3.0)}},
        {"plan": "rehearsal-x1", "seed": 0, "points": {"tuned": texts(1.0, 3.01)}},
        *(
            {"plan": "holdfast", "seed": seed, "points": {"tuned": texts(report, 3.02)}}
            for seed, report in enumerate((1.02, 1.0, 0.99))
        ),
    ]


def encoder_runs():
    """Chance is 50 %; plain learns to 90 %, and ``holdfast`` to 80 %."""
    pack, numbers = load("_samples").pack, load("_samples").pack_numbers
    pairs = np.arange(20) / 20

    def point(right, pairs, rho):
        samples = {"target_report": pack([i < right for i in range(10)]), "stsb": numbers(pairs)}
        share = right / 10
        return {"target_choose": share, "target_report": share, "stsb": rho, "samples": samples}

    def run(plan, family, points):
        return {"plan": plan, "family": family, "seed": 0, "points": points}

    merged = {"target_choose": 0.7, "target_report": 0.7, "stsb": 0.9}
    base = {"stsb": 1.0, "samples": {"stsb": numbers(pairs)}}
    return [
        {
            "plan": "pretrained", "metric": "accuracy", "points": {"base": base},
            "chance": {"target_choose": 0.5, "target_report": 0.5, "stsb": 0.0},
            "rows": {"choose": 10, "report": 10, "stsb": 20},
            "labels": {"target_report": pack([True] * 10), "stsb": numbers(pairs, 3)},
        },
        run("plain-0.0001", "plain", {"tuned": point(9, -pairs, -1.0), "wise-ft-0.5": merged}),
        run("holdfast", "holdfast", {"tuned": point(8, pairs, 1.0)}),
    ]  # fmt: skip


def write(folder, missing=(), **results):
    """Files of results, all with these missing runs, and the verdict of them."""
    made = [{"device": "GPU", "versions": {"torch": "2", "commit": "abc"}, "date": "2026-01-01"}]
    for name, runs in results.items():
        record = {"protocol": {}, "made": made, "missing": [*missing], "runs": runs}
        (folder / f"{name.replace('__', '-')}.json").write_text(json.dumps(record))
    verdict = load("verdict")
    verdict.write(folder)
    return verdict.read(folder)


def by_point(setting):
    return {(row["plan"], row["merged"]): row for row in setting["points"]}


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


def ablation_runs():
    runs = language_runs()
    return [runs[0], {"plan": "strength-3", "seed": 0, "points": {"tuned": texts(1.1, 3.0)}}]


def continual_runs():
    def point(gsm8k, mbpp, wikitext):
        losses = {"learned_gsm8k_nll": gsm8k, "learned_mbpp_nll": mbpp}
        return losses | {"wikitext_nll": wikitext, "wikitext_nll_se": 0.1}

    def run(plan, seed, last):
        points = {"1-gsm8k": point(1.0, 2.0, 3.0), "2-mbpp": point(last, 1.5, 4.0)}
        return {"plan": plan, "seed": seed, "points": points}

    base = {"plan": "pretrained", "points": {"base": point(2.0, 2.0, 3.0)}}
    return [base, *(run("holdfast", i, last) for i, last in enumerate((1.0, 1.25, 1.5)))]


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


@pytest.fixture
def page(monkeypatch):
    """The blocks of the page for a verdict, by name."""

    def blocks(found):
        with monkeypatch.context() as patch:
            patch.setattr(load("verdict"), "read", lambda: found)
            made = {make.__name__: make for make in load("_proof_tables").TABLES}
            del made["proof_small"]  # which has a file of its own
            return {name: make() for name, make in made.items()}

    return blocks


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
    assert "its loss falls from 4.00 to 2.00 nats. Medians of 3 seeds" in block
    assert "| plain fine-tuning, × 2, its best | 100.0 | 50.0 |" in block
    assert "| self-replay, × 1, its default | 90.0 | 95.2 |" in block
    assert "| – texts of an untrained model | 75.0 | 75.0 |" in block
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
    assert setting([*runs, *further, lucky]).best_plain == "plain-0.0001"


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
    assert "99/99 is reached in 1 of the 1 new settings." in told
    assert "not reached in" not in told
    assert (
        "of methods without old data: 1 of 4, 0 clearly; of rehearsal with real old data: 1 of 1, "
        "0 clearly." in told
    )
    assert "missing runs: SmolLM2-135M, MBPP (holdfast)." in told
    assert "without results: SmolLM2-135M, GSM8K; SmolLM2-135M, Shakespeare; " in told
    learned = "100.0<br>(98.0&nbsp;to&nbsp;101.0)"
    assert f"| SmolLM2-135M, BoolQ | new | {learned} | 99.7" in told
    assert "| WikiText-2 99.3 | 87.5 | **99/99 strictly** | 1 of 4, 0 clearly | 1 of 1" in told
    assert (
        "is there in 1 of 1 settings. So are 1 of 4 points of methods without old data and 1 of 1 "
        "of rehearsal with real old data. Points outside the picture: 1." in blocks["proof_all"]
    )
    equal = blocks["proof_equal_target"]
    assert "without old data does not reach this target at any learning rate in 1 of 3" in equal
    assert "keeps less than `holdfast` in 1 of 2 cases, by 12.2 points" in equal
    assert "old data does not reach this target at any learning rate in 0 of 1 cases" in equal
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


def test_rewritten_targets_are_shown_with_a_note(tmp_path, page):
    runs = [*language_runs(), {"plan": "sdft-x1", "seed": 0, "points": {"tuned": texts(1.5, 4.0)}}]
    details = page(write(tmp_path, smollm2_gsm8k=runs))["proof_details"]
    assert "| targets rewritten by the base | × 1 |" in details
    note = "- *targets rewritten by the base*: plain fine-tuning on solutions"
    assert details.count(note) == 2  # below the table at equal target, and below that of points
    assert "some of its solutions are only the final number." in details
    assert details.count("- *rehearsal of real old data*: an upper bound") == 2
    assert note not in page(write(tmp_path, smollm2_gsm8k=language_runs()))["proof_details"]


def ability_runs():
    """Plain fine-tuning learns 1 nat and forgets; ``holdfast`` learns 0.9 and forgets some."""
    pack = load("_samples").pack
    sizes = {"copy": 40, "refusals": 40, "lookup": 10, "rot13": 40}
    texts = ("choose", "report", "wikitext_0", "wikitext_512")

    def point(*losses, **right):
        figures = dict(zip((f"{name}_nll" for name in texts), losses, strict=True))
        samples = {
            name: [loss * n for n in TOKENS] for name, loss in zip(texts, losses, strict=True)
        }
        for test, count in right.items():
            figures[test] = count / sizes[test]
            samples[test] = pack([i < count for i in range(sizes[test])])
        return figures | {f"{name}_se": 0.0 for name in figures} | {"samples": samples}

    def run(plan, shares, point):
        return {"plan": plan, "seed": 0, "points": {"tuned": point}, "shares": shares}

    base = point(2.0, 2.0, 3.0, 2.5, copy=40, refusals=36, lookup=6, rot13=11)
    kinds = {"harmful": 0.8, "harmless": 1.0}
    return [
        {
            "plan": "pretrained", "left_out": ["rot13"],
            "points": {"base": base | {"sizes": sizes | dict.fromkeys(texts, TOKENS)}},
            "chance": {"copy": 0.0, "refusals": 0.5, "lookup": 0.5, "rot13": 0.25},
            "shares": {"refusals": kinds, "instructions": {"verse": 0.0}},
        },
        run("holdfast", {"refusals": kinds},
            point(1.1, 1.1, 3.0, 2.6, copy=36, refusals=36, lookup=6)),
        run("plain-x1", {"refusals": {"harmful": 0.4, "harmless": 1.0}},
            point(1.0, 1.0, 4.0, 5.0, copy=20, refusals=28, lookup=6)),
        run("lora-x6", {"refusals": {"harmful": 0.6, "harmless": 0.9}},
            point(1.5, 1.5, 3.0, 2.5, copy=40, refusals=30, lookup=7)),
    ]  # fmt: skip


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


def test_the_block_of_abilities(tmp_path, page):
    block = page(write(tmp_path, abilities=ability_runs()))["proof_limits"]
    assert block.startswith("## What it does not protect\n")
    assert "saturation" not in block
    assert (
        "`holdfast` keeps at least 98 % of 2 of 3 tests, plain fine-tuning × 1 of 1.\n"
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
    assert "at least 98 % of 3 of 3 tests" in block
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
        ablations=[*ablation_runs(), language_runs()[-1] | {"plan": "default"}],
        continual=continual_runs(), abilities=ability_runs(),
    )  # fmt: skip
    blocks = page(found)
    assert all(blocks.values())
    assert "not reached in: MiniLM-L6, RTE (learned 75.0 %)" in blocks["proof_verdict"]
    assert "in **1 of 2 settings** (by the 95 % intervals it is certain" in blocks["proof_headline"]
    assert "(img/proof-headline.svg)" in blocks["proof_headline"]
    assert "These are 2 of the 14 settings of the protocol." in blocks["proof_headline"]
    assert "The least learned is 90.0 % (strength 3)" in blocks["proof_ablations"]
    assert "learned of GSM8K: holdfast 75.0 % and 75.0 %" in blocks["proof_continual"]
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
    assert rows["plain-x1", "wise-ft-0.5"]["figures"]["report_nll"] == 1.5


def test_a_share_is_not_rounded_up_to_a_goal():
    percent = load("_proof_text").percent
    assert [percent(x) for x in (98.94, 98.96, 98.9996, 99.0, 97.99)] == [
        "98.9", "98.96", "98.9996", "99.0", "97.99",
    ]  # fmt: skip
