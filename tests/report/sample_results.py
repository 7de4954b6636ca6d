"""A comparison as one looks in use: SmolLM2-135M tuned on GSM8K; the figures are made up."""

import math
import random

from hypothesis import strategies as st

from holdfast.comparison.results import Measured, Moved, Results, RunResult
from holdfast.evaluate.report import Curve
from report.reports import curves, floats, maybe, metrics, names

#: What a recipe does: GSM8K's loss, and how much it forgets.
RECIPES = {
    "standard": (0.702, 1.0),
    "recadam": (0.698, 0.55),
    "flow": (0.696, 0.82),
    "recadam+flow": (0.699, 0.4),
    "l2-sp": (0.670, 0.5),
    "ewc": (0.675, 0.45),
    "mofo": (0.72, 0.48),
    "hft": (0.71, 0.7),
    "lora": (0.668, 0.1),
    "wise-ft": (0.694, 0.24),
    "sfa": (0.80, 0.06),
}
#: Metric, before, and what standard fine-tuning changes.
TESTS = {
    "WikiText-2": ("perplexity", 21.3, 8.1, True),
    "PIQA": ("acc_norm", 0.684, -0.031, False),
    "LAMBADA": ("acc", 0.429, -0.063, False),
}
VERSIONS = {"holdfast": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2"}
PLAN = {
    "model": "HuggingFaceTB/SmolLM2-135M",
    "data": "gsm8k-train.jsonl",
    "target": "gsm8k-dev.jsonl",
    "measuring": {"text": ["wiki.txt"], "tasks": ["piqa", "lambada"], "limit": None},
    "recipes": list(RECIPES),
    "seeds": [0, 1, 2],
    "training": {"lr": 1e-3, "epochs": 1.0, "batch_size": 16},
}


def measured(name, metric, before, after, lower=True):
    return Measured(name, metric, lower, before, after, None, None, 500)


def run(recipe, seed=0, target=0.7, share=1.0, tests=TESTS, **more):
    noise = random.Random(repr((recipe, seed)))
    curve = [share * 8 * (1 - math.exp(-step / 40)) for step in range(0, 161, 8)]
    losses = [target + 0.7 * math.exp(-step / 25) for step in range(8, 161, 8)]
    fields = {
        "id": f"{recipe}-{seed}-0123456789ab",
        "target": measured("GSM8K", "nll", 1.396, target + 0.003 * noise.uniform(-1, 1)),
        "retained": tuple(
            measured(n, m, b, b + c * share * noise.uniform(0.9, 1.1), low)
            for n, (m, b, c, low) in tests.items()
        ),
        "drift": Moved(8 * share, 0.06 * share),
        "kl": {"context-free": 1.24 * share, "GSM8K": 1.46 * share},
        "seconds": 210.0 + 40 * noise.random(),
        "peak_memory": int(6e9 * noise.uniform(0.9, 1.1)),
        "versions": VERSIONS,
        "curves": (
            Curve("distance", tuple(range(0, 161, 8)), tuple(curve)),
            Curve("loss", tuple(range(8, 161, 8)), tuple(losses)),
        ),
        **more,
    }
    return RunResult(recipe=recipe, seed=seed, **fields)


def sample_results(recipes=RECIPES, seeds=(0, 1, 2), tests=TESTS, **more):
    runs = (run(name, seed, *recipes[name], tests) for seed in seeds for name in recipes)
    return Results(tuple(runs), plan=PLAN, **more)


def simple(figures, before=2.0, lower=True):
    """Results of recipes by their targets, one a seed, and the perplexity of one retained test."""
    runs = [
        RunResult(
            id=f"{name}-{seed}",
            recipe=name,
            seed=seed,
            target=measured("new", "nll" if lower else "accuracy", before, value, lower),
            retained=() if kept is None else (measured("old", "perplexity", 10.0, kept),),
            drift=None,
            kl={},
            seconds=1.0,
            peak_memory=1,
        )
        for name, (targets, kept) in figures.items()
        for seed, value in enumerate(targets)
    ]
    return Results(tuple(runs))


def some(what, most=3):
    return st.lists(what, max_size=most).map(tuple)


#: Results of every kind, for property tests.
tests = st.builds(
    Measured, names, metrics, st.booleans(), floats, floats, maybe, maybe, st.integers(0)
)
runs = st.builds(
    RunResult,
    names,
    st.sampled_from(["standard", "flow"]) | names,
    st.integers(0, 2),
    tests,
    some(tests),
    st.none() | st.builds(Moved, floats, floats),
    st.dictionaries(names, floats, max_size=2),
    floats,
    st.integers(0),
    st.dictionaries(names, names, max_size=2),
    st.dictionaries(names, names | st.integers() | st.floats(allow_nan=False), max_size=2),
    some(curves, 2),
)
every_results = st.builds(
    Results, some(runs, 6), st.dictionaries(names, names, max_size=2), st.just(PLAN)
)
