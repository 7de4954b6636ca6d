"""Which recipe of a comparison to take, and which α of a sweep.

The rule for recipes:

1. Medians over seeds count. A recipe is a candidate if its target score is finite and better than
   the pretrained model's. Without a candidate, keep the pretrained model.
2. A candidate is *close* to the best if its target score is within 1 % of the best one (relative to
   it), or if the range of its seeds overlaps with that of the best one.
3. Of the close candidates, take the one that forgets least: the mean over the retained tests of the
   relative loss. A gain counts as no loss. A tie goes to the better target score.
4. Without retained tests, take the one whose predictions moved least, by KL(base‖tuned).

A recipe that was chosen on other data (``Results.taken``) is recommended regardless.

The rule for α: its target score is close if it is within 1 % of the best one, or if the 95 %
interval of its gain over the base reaches the best gain. Losses are on the scale of the verdict (1
is where a loss stops being little). Without retained tests, take the smallest close α. Without a
target score there is no recommendation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from holdfast.report.document import Answer
from holdfast.report.verdict import verdict
from holdfast.report.words import change_of, level, percent, plain

if TYPE_CHECKING:
    from holdfast.comparison.results import Results, Summary
    from holdfast.evaluate.report import ForgettingReport, Score
    from holdfast.evaluate.sweep import Sweep, SweepPoint

    Found = tuple[SweepPoint, Score]

#: Relative distance to the best target score that counts as close, and as near.
CLOSE, NEAR = 0.01, 0.05
#: The name of the recipe that is plain fine-tuning.
STANDARD = "standard"

_NO_TESTS = "To see what was forgotten, test tasks that the model should keep."
_CONFIRM = "The choice was made on these samples: confirm it on others."

Key = tuple[str, str, str]


@dataclass(frozen=True)
class Recommendation(Answer):
    """The answer of a comparison."""

    label: str | None = None  # the recipe to take; None for the pretrained model
    best: str | None = None  # the best recipe on the target
    gentle: str | None = None  # the recipe that forgets least within 5 % of the best


@dataclass(frozen=True)
class AlphaRecommendation(Answer):
    """The answer of a sweep."""

    alpha: float | None = None  # the α to take; None if the target was not tested


def recommend(results: Results) -> Recommendation:
    """Apply the rule for recipes, and give the reasons."""
    found = results.summaries()
    total = len(results.failed) + len(results.runs)
    failed = [f"{len(results.failed)} of {total} runs failed."] if results.failed else []
    if not found:
        return Recommendation("No run has finished.", tuple(failed))
    target = plain(found[0].target.name)
    better = [s for s in found if math.isfinite(s.target.after) and s.target.gain > 0]
    if not better:
        headline = f"Keep the pretrained model: no recipe made it better on {target}."
        return Recommendation(headline, tuple(failed))
    best = min(better, key=lambda s: (_target_first(s), s.loss))
    close = [s for s in better if _within(s, best, CLOSE) or _overlap(s, best)]
    near = [s for s in better if s in close or _within(s, best, NEAR)]
    gentle = _gentlest(near)
    taken = next((s for s in found if s.label == results.taken), None)
    chosen = taken or _gentlest(close)
    standard = standard_of(found)
    last = "forgets least" if any(s.retained for s in close) else "moves the predictions least"
    reason = _reason(len(close), "recipe", target, last)
    if len(found) == 1:
        reason = f"it is the only recipe, and better than the pretrained model on {target}"
    if taken is not None:
        reason = "on the data for choosing, it was close to the best and forgot least"
    sentences = [*_on_recipes(chosen, best, gentle, standard), *failed]
    if not any(s.retained for s in found):
        sentences.append(_NO_TESTS)
    if len(found) > 1 and all(s.seeds == 1 for s in found):
        sentences.append("Only one seed was run: small differences may be chance.")
    if len(found) > 1 and taken is None:
        sentences.append(_CONFIRM)
    headline = f"Take {plain(chosen.label)}: {reason}."
    return Recommendation(headline, tuple(sentences), chosen.label, best.label, gentle.label)


def recommend_alpha(sweep: Sweep) -> AlphaRecommendation:
    """Apply the rule for α, and give the reasons."""
    found = targets_of(sweep)
    finite = [(point, score) for point, score in found if math.isfinite(score.after.value)]
    advice = [] if any(retained(point.report) for point in sweep.points) else [_NO_TESTS]
    if not finite:
        why = "its target score is not a finite number" if found else "no target was tested"
        sentences = (*_on_alphas(sweep, found, None), *advice)
        return AlphaRecommendation(f"No α is recommended: {why}.", sentences)
    best = min(finite, key=_alpha_first)
    close = [row for row in finite if _is_close(row[1], best[1])]
    if any(retained(point.report) for point, _ in close):
        chosen = min(close, key=lambda row: (loss_of(row[0].report), _alpha_first(row)))
        last = "forgets least"
    else:
        chosen = min(close, key=lambda row: row[0].alpha)
        last = "stays closest to the base"
    point, target = chosen[0], plain(chosen[1].name)
    sentences = (*_on_alphas(sweep, found, point.alpha), *advice, _CONFIRM)
    take = {0.0: "Keep the base", 1.0: "Keep the tuned model"}
    take_it = take.get(point.alpha, f"Take α = {point.alpha:g}")
    headline = f"{take_it}: {_reason(len(close), 'α', target, last)}."
    return AlphaRecommendation(headline, sentences, point.alpha)


def standard_of(found: Sequence[Summary]) -> Summary | None:
    """Plain fine-tuning, with the values that are best on the target, if it was run."""
    plain_ones = [s for s in found if s.recipe == STANDARD and math.isfinite(s.target.after)]
    return min(plain_ones, key=_target_first, default=None)


def kl_of(summary: Summary) -> float | None:
    """How far its predictions moved: on the base's own texts, else on the first inputs."""
    return summary.kl.get("context-free", next(iter(summary.kl.values()), None))


def targets_of(sweep: Sweep) -> list[Found]:
    """The points that have the first target score, each with that score."""
    scores = [(p, s) for p in sweep.points for s in p.report.scores if s.role == "target"]
    return [(p, s) for p, s in scores if key_of(s) == key_of(scores[0][1])]


def key_of(score: Score) -> Key:
    """The identity of a score at every α."""
    return score.name, score.metric, score.role


def retained(report: ForgettingReport) -> list[Score]:
    """The scores on tasks that the model should keep."""
    return [score for score in report.scores if score.role == "retained"]


def loss_of(report: ForgettingReport, key: Key | None = None) -> float:
    """The mean loss over the retained scores, or over one, on the scale of the verdict."""
    changes = [change_of(s) for s in retained(report) if key in (None, key_of(s))]
    losses = [
        math.inf if c.outcome == "broken" else c.severity if c.worse else 0.0 for c in changes
    ]
    return sum(losses) / len(losses) if losses else 0.0


def _target_first(summary: Summary) -> float:
    """Least for the best on the target."""
    return (1 if summary.target.lower_is_better else -1) * summary.target.after


def _alpha_first(row: Found) -> tuple[float, float]:
    """Least for the best on the target; a tie goes to the largest α."""
    point, score = row
    return (1 if score.lower_is_better else -1) * score.after.value, -point.alpha


def _within(summary: Summary, best: Summary, share: float) -> bool:
    top = best.target.after
    return abs(summary.target.after - top) <= share * abs(top)


def _overlap(one: Summary, other: Summary) -> bool:
    """Whether the ranges of their seeds' target scores overlap."""
    values = [run.target.after for run in one.runs], [run.target.after for run in other.runs]
    known = [[value for value in some if math.isfinite(value)] for some in values]
    return all(known) and max(map(min, known)) <= min(map(max, known))


def _is_close(score: Score, best: Score) -> bool:
    if abs(score.after.value - best.after.value) <= CLOSE * abs(best.after.value):
        return True
    change, top = change_of(score), change_of(best).value
    if score.lower_is_better:
        return change.low is not None and change.low <= top
    return change.high is not None and change.high >= top


def _gentlest(among: Sequence[Summary]) -> Summary:
    if any(s.retained for s in among):
        return min(among, key=lambda s: (s.loss, _target_first(s)))
    moved = {s.label: math.inf if (kl := kl_of(s)) is None else kl for s in among}
    return min(among, key=lambda s: (moved[s.label], _target_first(s)))


def _reason(close: int, what: str, target: str, last: str) -> str:
    if close == 1:
        return f"no other {what} comes close on {target}"
    several = what if what == "α" else f"{what}s"
    return f"of the {close} {several} close to the best on {target}, it {last}"


def _on_recipes(
    chosen: Summary, best: Summary, gentle: Summary, standard: Summary | None
) -> list[str]:
    """One sentence per recipe that matters for the choice, and one for the pretrained model."""
    target, metric = plain(chosen.target.name), chosen.target.metric
    shown = {
        chosen.label: (plain(chosen.label), chosen),
        best.label: (f"The best, {plain(best.label)}", best),
        gentle.label: (f"To forget less, take {plain(gentle.label)}", gentle),
    }
    if standard is not None:
        shown.setdefault(standard.label, ("Standard fine-tuning", standard))
    shown[chosen.label] = plain(chosen.label), chosen
    said = []
    for who, summary in shown.values():
        lost = f", lost {percent(summary.loss)} on average" if summary.retained else ""
        value = level(metric, summary.target.after)
        said.append(f"{who}: {value} {plain(metric)} on {target}{lost}.")
    return [*said, f"The pretrained model: {level(metric, chosen.target.before)}."]


def _on_alphas(sweep: Sweep, found: Sequence[Found], alpha: float | None) -> list[str]:
    """One sentence for the chosen model, the tuned one and the base."""
    scores = {point.alpha: score for point, score in found}
    said = []
    for point in sweep.points:
        if point.alpha in (0, alpha, 1):
            names = {0.0: "The base", 1.0: "The tuned model"}
            words = [f"{names.get(point.alpha, f'α = {point.alpha:g}')}:"]
            if score := scores.get(point.alpha):
                value = level(score.metric, score.after.value)
                words.append(f"{value} {plain(score.metric)} on {plain(score.name)}.")
            if point.alpha != 0 and retained(point.report):
                words.append(verdict(point.report).headline)
            said += [" ".join(words)] if len(words) > 1 else []
    return said
