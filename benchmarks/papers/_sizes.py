"""The rule that chose the learning rate of ``holdfast`` for a larger language model.

The runs are those of language_sizes.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from _epochs import KEPT, factor_of

Record = dict[str, Any]
Case = tuple[str, int, int]

#: The learning rates for many samples and one epoch; those of a case follow from its size.
RATES = (2.5e-5, 5e-5, 1.2e-5, 1e-4, 6e-6)
#: The task, its samples and epochs.
CASES: tuple[Case, ...] = (("math", 3000, 1), ("medmcqa", 2000, 2), ("math", 600, 3))
ROOT, POWER = 0.5, 1.0  # of the samples and the epochs, chosen by language_epochs.py


def lr_of(case: Case, rate: float) -> float:
    """The learning rate of a case."""
    return rate * factor_of(case[1], case[2], ROOT, POWER)


def name_of(case: Case, rate: float) -> str:
    return f"sizes-{case[0]}-{case[1]}x{case[2]}-{rate:g}"


def figures(done: Mapping[str, Record], case: Case) -> dict[float, tuple[float, float]]:
    """What the runs of a case learned and kept, by their learning rates."""
    names = {rate: name_of(case, rate) for rate in sorted(RATES)}
    return {rate: of_run(done, case, name) for rate, name in names.items() if name in done}


def of_run(done: Mapping[str, Record], case: Case, name: str) -> tuple[float, float]:
    """What a run learned, of what the best of its case did, and what it kept; in percent."""
    base, field = done["sizes-pretrained"]["points"]["1"], f"{case[0]}_nll"

    def gain(run: str) -> float:
        return float(base[field] - done[run]["points"]["1"][field])

    most = max(gain(run) for rate in RATES if (run := name_of(case, rate)) in done)
    point = done[name]["points"]["1"]
    kept = [min(100.0, 100 * base[test] / point[test]) for test in KEPT]
    return 100 * gain(name) / most, float(np.mean(kept))


def chosen(cases: Mapping[Case, Mapping[float, tuple[float, float]]]) -> float:
    """The learning rate with the highest sum of both, in the mean over the cases.

    >>> one, other = {1e-5: (90, 99), 2e-5: (100, 98)}, {1e-5: (100, 99), 2e-5: (95, 97)}
    >>> chosen({("a", 3000, 1): one, ("b", 3000, 1): other})
    2e-05
    """

    def sums(rate: float) -> float:
        return float(np.mean([sum(found[rate]) for found in cases.values()]))

    return max(sorted(set.intersection(*map(set, cases.values()))), key=sums)
