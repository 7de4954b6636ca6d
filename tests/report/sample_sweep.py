"""A sweep as one looks in use: SmolLM2-135M tuned on GSM8K; the figures are made up."""

from dataclasses import replace

from holdfast.evaluate.report import DriftRow
from holdfast.evaluate.sweep import Sweep, SweepPoint
from report.sample_report import estimate, sample, score

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
#: What α = 1 changes, and how that grows with α: by a power, or, below 0, soon and then little.
TESTS = {
    "WikiText-2": ("perplexity", 16.49, 2.07, True, "retained", 2.2, 0.2),
    "PIQA": ("acc_norm", 0.684, -0.031, False, "retained", 2.0, 0.0094),
    "ARC-easy": ("acc_norm", 0.586, -0.003, False, "retained", 1.0, 0.0081),
    "LAMBADA": ("acc", 0.429, -0.063, False, "retained", 2.6, 0.0102),
    "GSM8K": ("nll", 1.396, -0.591, True, "target", -3, 0.019),
}
RETAINED = {name: test for name, test in TESTS.items() if test[4] == "retained"}
TARGET = {name: test for name, test in TESTS.items() if test[4] == "target"}


def grown(alpha, power):
    return alpha**power if power > 0 else 1 - (1 - alpha) ** -power


def report(alpha, tests=TESTS):
    found = sample()
    scores = tuple(
        score(name, metric, before, before + change * grown(alpha, power), margin * 2,
              margin * alpha**0.5, 1838, lower, role)
        for name, (metric, before, change, lower, role, power, margin) in tests.items()
    )  # fmt: skip
    divergences = tuple(
        replace(d, kl=estimate(d.kl.value * alpha**2, 0.05 * d.kl.value * alpha, d.kl.n))
        for d in found.divergences
    )
    total = found.drift.total
    moved = replace(
        found.drift, total=DriftRow("total", alpha * total.distance, total.norm, total.size)
    )
    moved = replace(moved, tensors=(), layers=(), kinds=())
    return replace(found, scores=scores, divergences=divergences, drift=moved, curves=())


def sample_sweep(tests=TESTS, alphas=ALPHAS):
    kinds = {0.0: "base", 1.0: "tuned"}
    points = tuple(
        SweepPoint({"alpha": alpha}, report(alpha, tests), kinds.get(alpha, "merged"))
        for alpha in alphas
    )
    tuned = "runs/smollm2-gsm8k"
    return Sweep("HuggingFaceTB/SmolLM2-135M", tuned, points, "WiseFT", models=(tuned,))
