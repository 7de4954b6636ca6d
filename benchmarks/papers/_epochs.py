"""The rule that chose the learning rate of ``holdfast`` by samples and epochs.

The runs are those of language_epochs.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Record = dict[str, Any]

LR = 5e-4
FACTORS = (0.1, 0.2, 0.4, 1.0)
#: The task, its samples and epochs.
CASES = (
    ("math", 600, 1), ("math", 3000, 1), ("medmcqa", 2000, 2), ("math", 600, 3), ("math", 600, 6),
)  # fmt: skip
ENOUGH = 3000  # samples: more of them do not change the learning rate
#: What is chosen from.
ROOTS, POWERS = (0.0, 0.25, 0.5, 0.75), (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
KEPT = ("shakespeare_nll", "wikitext_valid_nll", "gsm8k_train_nll")
Curves = dict[tuple[str, int, int], dict[float, float]]


def losses(done: Mapping[str, Record]) -> Curves:
    """Of each case and factor, the loss of the task, divided by what the best factor gains."""
    base, found = done["epochs-pretrained"]["points"]["1"], Curves()
    for case in CASES:
        field = f"{case[0]}_nll"
        some = {
            factor: done[name]["points"]["1"][field]
            for factor in FACTORS
            if (name := name_of(case, factor)) in done
        }
        best = base[field] - min(some.values(), default=0.0)
        found[case] = {factor: loss / best for factor, loss in some.items()}
    return found


def factor_of(samples: int, epochs: int, root: float, power: float) -> float:
    """The rule: no more than 1, and no less than what was measured.

    >>> [round(factor_of(600, epochs, 0.5, 1.0), 3) for epochs in (1, 3, 6)]
    [0.447, 0.149, 0.1]
    """
    found: float = min(1.0, samples / ENOUGH) ** root / epochs**power
    return max(FACTORS[0], found)


def chosen(curves: Curves) -> tuple[float, float]:
    """The root of the samples and the power of the epochs with the least mean loss.

    Between factors, losses are interpolated on a logarithmic scale.

    >>> def curve(best: float) -> dict[float, float]:
    ...     return {factor: (math.log(factor / best) / 3) ** 2 for factor in FACTORS}
    >>> chosen({("a", 3000, 1): curve(1), ("a", 750, 1): curve(0.5), ("a", 3000, 4): curve(0.25)})
    (0.5, 1.0)
    """

    def cost(root: float, power: float) -> float:
        found = []
        for (_, samples, epochs), curve in curves.items():
            factor = factor_of(samples, epochs, root, power)
            found.append(np.interp(math.log(factor), np.log([*curve]), [*curve.values()]))
        return float(np.mean(found))

    return min(itertools.product(ROOTS, POWERS), key=lambda pair: cost(*pair))


def name_of(case: tuple[str, int, int], factor: float) -> str:
    return f"epochs-{case[0]}-{case[1]}x{case[2]}-x{factor:g}"
