"""Successive halving: all candidates train a little, the best third of them goes on.

The rungs are 1/9, 1/3 and all of the updates. A candidate is a training planned for all updates,
so at a rung the learning rate is that of the middle of its schedule, the same for all candidates.

At a rung, candidates are ranked by their *merit*, because Optuna's pruners need one number:

    merit = gain on the target / (1 + 0.05 * what was lost on the retained tests)

For candidates with a gain, the order does not depend on the unit of the target. A loss that stops
being little weighs like 5 % of the gain, as in the recommendation. Candidates without a gain come
after them, and their order does depend on the unit. A candidate that is worse in one of the two and
not better in the other has less merit, so none that belongs on the frontier is ranked below one
that it beats. The merit decides which trainings go on, what the sampler draws, and which model the
progress calls the best so far. The recipe to take is chosen by the rule of the recommendation.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

#: One of this many candidates goes on at a rung.
REDUCTION = 3
#: The shares of the updates at which candidates are compared; all of them train the last one.
RUNGS = (Fraction(1, 9), Fraction(1, 3), Fraction(1))


def rungs_of(total: int) -> dict[int, int]:
    """The numbers of the rungs before the end of a training, by update.

    >>> rungs_of(90), rungs_of(4), rungs_of(1)
    ({10: 0, 30: 1}, {1: 0, 2: 1}, {})
    """
    found: dict[int, int] = {}
    for number, share in enumerate(RUNGS[:-1]):
        update = math.ceil(total * share)
        if update < total:
            found.setdefault(update, number)
    return found


def step_of(rung: int) -> int:
    """The step that Optuna's pruner knows a rung by: 1, 3, 9."""
    return int(REDUCTION**rung)


def make_pruner(prune: bool) -> Any:
    """Optuna's pruner; without ``prune``, one that stops nothing."""
    import optuna

    if not prune:
        return optuna.pruners.NopPruner()
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=REDUCTION)


def goes_on(merit: float, others: Sequence[float]) -> bool:
    """Whether a candidate is among the best third of all at its rung, itself included in them.

    This is the rule of Optuna's pruner, for candidates that are judged together.

    >>> [goes_on(merit, [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) for merit in (4.0, 5.0, 6.0)]
    [False, True, True]
    """
    ranked = sorted(others, reverse=True)
    return merit >= ranked[max(1, len(ranked) // REDUCTION) - 1]


def merit_of(gain: float, lost: float) -> float:
    """The merit of a model; it grows with the gain, and falls with what was lost.

    Without a gain it is negative, and still falls with what was lost.

    >>> merit_of(2.0, 1.0), merit_of(-0.5, 1.0)
    (1.0, -2.0)
    """
    return gain / (1 + lost) if gain > 0 else gain * (1 + lost) - lost
