"""The objectives of a search: the target and what was lost, and one figure of both."""

from collections.abc import Sequence
from typing import Any

from holdfast.comparison import halving
from holdfast.comparison.results import Measured, RunResult, loss_of
from holdfast.comparison.study import counted
from holdfast.report import LEARN_AT_LEAST

#: The version of the objectives, which changes with the unit of either: a study has those of one.
OBJECTIVES = 2


def goals_of(target: Measured, retained: Sequence[Measured], moved: float) -> tuple[float, float]:
    """The two objectives, lower is better: the target, and what was forgotten.

    Without retained tests, the second one is how far the model moved.
    """
    sign = 1 if target.lower_is_better else -1
    return sign * target.after, loss_of(retained) if retained else moved


def goals_in(result: RunResult) -> tuple[float, float]:
    far = 0.0 if result.drift is None else result.drift.relative
    no_evidence = {result.target.name, *result.trained_on}  # the target's predictions are to change
    evidence = [kl for name, kl in result.kl.items() if name not in no_evidence]
    return goals_of(result.target, result.retained, next(iter(evidence), far))


def merit_in(result: RunResult) -> float:
    """The one objective of successive halving, higher is better."""
    lost = goals_in(result)[1]
    share = lost * (1 - LEARN_AT_LEAST) if result.retained else lost
    return halving.merit_of(result.target.gain, share)


def hopeless(study: Any, update: int, goals: Sequence[float]) -> bool:
    """Whether at least half of four or more completed trials were better in both objectives then.

    This is the rule of Optuna's median pruner, which supports only one objective.
    """
    then = [
        trial.user_attrs["looks"][str(update)]
        for trial in counted(study)
        if trial.state.name == "COMPLETE" and str(update) in trial.user_attrs.get("looks", {})
    ]
    better = [all(a < b for a, b in zip(look, goals, strict=True)) for look in then]
    return len(then) >= 4 and 2 * sum(better) >= len(then)
