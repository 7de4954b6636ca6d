"""Small results of the proof, whose measures are known by hand."""

import importlib
import json
from pathlib import Path

import numpy as np

PROOF = Path(__file__).parents[1] / "benchmarks" / "proof"
TOKENS = [1, 2, 3, 4]  # of the requests of a text


def load(name):
    return importlib.import_module(name)


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


def rate_run(times, report, wikitext):
    """``holdfast`` at a multiple of its default learning rate."""
    points = {"tuned": texts(report, wikitext)}
    return {"plan": f"rate-x{times:g}", "seed": 0, "points": points}


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
