"""Which α of a sweep to take.

The rule, which no setting changes:

1. The target is the first target score. An α is *close* to the best if its target score is within
   1 % of the best one, or if the 95 % interval of its gain over the base reaches the best gain.
2. Of those, the one that loses least on the retained tests: the mean over their scores of how bad a
   loss is, on the scale of the verdict (1 is where a loss stops being little: 1 point, 0.05 nats a
   token, 5 % in perplexity). A gain counts as no loss. Of equals, the best on the target.
3. Where nothing retained was tested, the smallest of the close ones: it is closest to the base.
4. Without a target score there is no recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.evaluate.report import ForgettingReport, Score
from holdfast.report.words import change_of, level, listed, plain

if TYPE_CHECKING:
    from holdfast.evaluate.sweep import Sweep, SweepPoint

__all__ = ["Recommendation", "recommend"]

#: What still is as good as the best, relative to it.
WITHIN = 0.01

Found = tuple["SweepPoint", Score]
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Recommendation:
    """The answer of a sweep.

    Attributes:
        alpha: the one to take; None where the target was not tested.
        headline: one sentence.
        sentences: what else there is to say, the most important first.
    """

    alpha: float | None
    headline: str
    sentences: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join([self.headline, *self.sentences])


def recommend(sweep: Sweep) -> Recommendation:
    """Apply the rule, and say why."""
    found = targets_of(sweep)
    finite = [(point, score) for point, score in found if math.isfinite(score.after.value)]
    if not finite:
        why = "its target score is not a finite number" if found else "no target was tested"
        return Recommendation(
            None, f"No α is recommended: {why}.", (*_on_losses(sweep, None), *_advice(sweep, found))
        )
    best = min(finite, key=_from_the_top)
    close = [row for row in finite if _is_close(row[1], best[1])]
    tested = any(retained(point.report) for point, _ in close)
    if tested:
        chosen = min(close, key=lambda row: (loss_of(row[0].report), _from_the_top(row)))
    else:
        chosen = min(close, key=lambda row: row[0].alpha)
    return Recommendation(
        chosen[0].alpha,
        _headline(chosen, close, tested),
        (
            *_on_target(chosen, best, finite),
            *_on_losses(sweep, chosen[0].alpha),
            *_on_others(close),
            *_advice(sweep, found),
        ),
    )


def targets_of(sweep: Sweep) -> list[Found]:
    """The points that have the target score, the first of those there are, with it."""
    scores = [(p, s) for p in sweep.points for s in p.report.scores if s.role == "target"]
    return [(p, s) for p, s in scores if key_of(s) == key_of(scores[0][1])]


def key_of(score: Score) -> Key:
    """What makes it the same score at another α."""
    return score.name, score.metric, score.role


def retained(report: ForgettingReport) -> list[Score]:
    """The scores of what it should have kept."""
    return [score for score in report.scores if score.role == "retained"]


def loss_of(report: ForgettingReport, key: Key | None = None) -> float:
    """The mean loss over the retained scores, or over one, on the scale of the verdict."""
    scores = (score for score in retained(report) if key in (None, key_of(score)))
    losses = [_loss(score) for score in scores]
    return sum(losses) / len(losses) if losses else 0.0


def worst_of(report: ForgettingReport) -> Score | None:
    """The retained score that is measurably worse, by most."""
    lost = [s for s in retained(report) if change_of(s).outcome in ("lost", "broken")]
    return max(lost, key=lambda score: change_of(score).severity, default=None)


def _loss(score: Score) -> float:
    """How bad a loss is; a gain is none."""
    change = change_of(score)
    if change.outcome == "broken":
        return math.inf
    worse = change.value > 0 if score.lower_is_better else change.value < 0
    return change.severity if worse else 0.0


def _from_the_top(row: Found) -> tuple[float, float]:
    """Least for the best on the target; of equals, for the largest α."""
    point, score = row
    return (1 if score.lower_is_better else -1) * score.after.value, -point.alpha


def _is_close(score: Score, best: Score) -> bool:
    if abs(score.after.value - best.after.value) <= WITHIN * abs(best.after.value):
        return True
    change, top = change_of(score), change_of(best).value
    if score.lower_is_better:
        return change.low is not None and change.low <= top
    return change.high is not None and change.high >= top


def _headline(chosen: Found, close: Sequence[Found], tested: bool) -> str:
    alpha, target = chosen[0].alpha, plain(chosen[1].name)
    take = {0.0: "Keep the base", 1.0: "Keep the tuned model"}.get(alpha, f"Take α = {alpha:g}")
    if len(close) == 1:
        return f"{take}: no other α comes close on {target}."
    last = "forgets least" if tested else "stays closest to the base"
    return f"{take}: of the models close to the best on {target}, it {last}."


def _on_target(chosen: Found, best: Found, found: Sequence[Found]) -> list[str]:
    def at(row: Found) -> str:
        return level(row[1].metric, row[1].after.value)

    point, score = chosen
    others = [] if best[0] is point else [f"the best has {at(best)} (α = {best[0].alpha:g})"]
    if point.alpha != 0:
        others.append(f"the base has {level(score.metric, score.before.value)}")
    words = f"On the target {plain(score.name)} it has {at(chosen)} {plain(score.metric)}"
    return [f"{words}; {listed(others)}." if others else f"{words}."]


def _on_losses(sweep: Sweep, alpha: float | None) -> list[str]:
    """The worst loss of the chosen model, and of the tuned one."""
    said = []
    for point in sweep.points:
        if point.alpha not in (alpha, 1) or point.alpha == 0 or not retained(point.report):
            continue
        who = "The tuned model" if point.alpha == 1 else f"α = {point.alpha:g}"
        worst = worst_of(point.report)
        if worst is None:
            said.append(f"{who} has no measurable loss on what was tested.")
            continue
        change = change_of(worst)
        most = ", its worst" if len(retained(point.report)) > 1 else ""
        said.append(f"{who} lost {change.amount} on {plain(worst.name)}{most}.")
    return said


def _on_others(close: Sequence[Found]) -> list[str]:
    if len(close) == 1:
        return []
    alphas = listed([f"{point.alpha:g}" for point, _ in close], most=12)
    return [f"Close to the best on the target: α = {alphas}."]


def _advice(sweep: Sweep, found: Sequence[Found]) -> list[str]:
    said = []
    if not found:
        said.append("Give what the model was tuned for as the target, to see which α keeps it.")
    if not any(retained(point.report) for point in sweep.points):
        said.append("What was forgotten takes a test of tasks that it should have kept.")
    if found:
        said.append("α was chosen on these very samples: confirm it on others.")
    return said
