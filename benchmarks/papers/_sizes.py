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
    """What the runs of a case learned, of what the best of them did, and kept; in percent."""
    base, field = done["sizes-pretrained"]["points"]["1"], f"{case[0]}_nll"
    points = {
        rate: done[name]["points"]["1"]
        for rate in sorted(RATES)
        if (name := name_of(case, rate)) in done
    }
    most = max((base[field] - point[field] for point in points.values()), default=1.0)
    return {
        rate: (
            100 * (base[field] - point[field]) / most,
            float(np.mean([min(100.0, 100 * base[test] / point[test]) for test in KEPT])),
        )
        for rate, point in points.items()
    }


def chosen(cases: Mapping[Case, Mapping[float, tuple[float, float]]]) -> float:
    """The learning rate with the highest sum of both, in the mean over the cases.

    >>> one, other = {1e-5: (90, 99), 2e-5: (100, 98)}, {1e-5: (100, 99), 2e-5: (95, 97)}
    >>> chosen({("a", 3000, 1): one, ("b", 3000, 1): other})
    2e-05
    """

    def sums(rate: float) -> float:
        return float(np.mean([sum(found[rate]) for found in cases.values()]))

    return max(sorted(set.intersection(*map(set, cases.values()))), key=sums)
