"""Which recipe of a comparison to take, and which point of a sweep.

The rule for recipes:

1. Medians over seeds count. A recipe is a candidate if its target score is finite and better than
   the pretrained model's. Without a candidate, keep the pretrained model.
2. A candidate is *close* to the best if its target score is within 1 % of the best one (relative to
   it), or if the range of its seeds overlaps with that of the best one.
3. Of the close candidates, take the one that forgets least: the mean over the retained tests of the
   relative loss. A gain counts as no loss. A tie goes to the better target score.
4. Without retained tests, take the one whose predictions moved least, by KL(base‖tuned), on inputs
   that no recipe was trained on. Without such inputs, take the best.

The answer also names the recipe that forgets least of those with at least 90 % of the best gain.

A recipe that was chosen on other data (``Results.taken``) is recommended regardless.

The rule for the points of a sweep is the same, with three differences: every point with a finite
target score is a candidate; a point is also close if the 95 % interval of its gain over the base
reaches the best gain; losses are on the scale of the verdict (1 is where a loss stops being
little). Without retained tests, take the close point that is nearest to the base. Without a target
score there is no recommendation.

With limits (``retain``, ``max_kl``), the candidates are the points within them, and the best on the
target is taken; without a target score, the one that is farthest from the base. ``retain = 0.99``
means that no retained score is worse than the base's by more than 1 %, relative to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from holdfast._torch.finite import is_finite
from holdfast.report.document import Answer
from holdfast.report.verdict import NO_TESTS, verdict
from holdfast.report.words import change_of, percent, plain, score_text, settings_text, symbol

if TYPE_CHECKING:
    from holdfast.comparison.results import Results, Summary
    from holdfast.evaluate.report import Score
    from holdfast.evaluate.sweep import Sweep, SweepPoint

#: Relative distance to the best target score that counts as close.
CLOSE = 0.01
#: Share of the best gain on the target for which a recipe is named that forgets less.
NEAR = 0.9
#: The recipe that is plain fine-tuning.
STANDARD = "standard"

_CONFIRM = "The choice was made on these samples: confirm it on others."


@dataclass(frozen=True)
class Recommendation(Answer):
    """The answer of a comparison."""

    label: str | None = None  # the recipe to take; None for the pretrained model
    best: str | None = None  # the best recipe on the target
    gentle: str | None = None  # the recipe that forgets least with 90 % of the best gain


@dataclass(frozen=True)
class SweepRecommendation(Answer):
    """The answer of a sweep."""

    settings: dict[str, float] | None = None  # those to take; None without a recommendation


class Choice(NamedTuple):
    """A recipe or a point of a sweep. Less is better of all numbers."""

    label: str
    says: str  # its sentence
    target: float  # the score; NaN without one
    low: float  # the range of the score over the seeds, or the interval of its change
    high: float
    loss: float | None  # None without retained tests
    moved: float  # the KL, or the distance from the base: decides without retained tests

    def close_to(self, best: Choice) -> bool:
        overlap = max(self.low, best.low) <= min(self.high, best.high)
        return overlap or abs(self.target - best.target) <= CLOSE * abs(best.target)


def recommend(results: Results) -> Recommendation:
    summaries = results.summaries()
    total = len(results.failed) + len(results.runs)
    failed = [f"{len(results.failed)} of {total} runs failed."] if results.failed else []
    if not summaries:
        return Recommendation("No run has finished.", tuple(failed))
    start, target = summaries[0].target, plain(summaries[0].target.name)
    signals = {name for s in summaries for name in s.trained_on}
    found = {s.label: _recipe(s, signals) for s in summaries}
    better = [found[s.label] for s in summaries if s.target.gain > 0]
    better = [c for c in better if is_finite(c.target)]
    if not better:
        headline = f"Keep the pretrained model: no recipe made it better on {target}."
        return Recommendation(headline, tuple(failed))
    best = min(better, key=lambda c: (c.target, c.loss or 0.0))
    close = [c for c in better if c.close_to(best)]
    gains = {s.label: s.target.gain for s in summaries}
    enough = NEAR * gains[best.label]
    gentle = _gentlest([c for c in better if c in close or gains[c.label] >= enough])
    chosen = found.get(results.taken or "", _gentlest(close))
    untested = "moves the predictions least"
    if not any(is_finite(c.moved) for c in close):
        untested = "is the best"
    reason = _reason(close, "recipe", "recipes", target, untested)
    if len(found) == 1:
        reason = f"it is the only recipe, and better than the pretrained model on {target}"
    if results.taken in found:
        reason = "on the data for choosing, it was close to the best and forgot least"
    names = {
        chosen.label: plain(chosen.label),
        best.label: f"The best, {plain(best.label)}",
        gentle.label: f"To forget less, take {plain(gentle.label)}",
    }
    if (standard := standard_of(summaries)) is not None:
        names.setdefault(standard.label, "Standard fine-tuning")
    names[chosen.label] = plain(chosen.label)
    sentences = [f"{name}: {found[label].says}" for label, name in names.items()]
    sentences += [f"The pretrained model: {score_text(start.metric, start.before)}.", *failed]
    if not any(s.retained for s in summaries):
        sentences.append(NO_TESTS)
    if len(found) > 1 and all(s.seeds == 1 for s in summaries):
        sentences.append("Only one seed was run: small differences may be chance.")
    if len(found) > 1 and results.taken not in found:
        sentences.append(_CONFIRM)
    headline = f"Take {plain(chosen.label)}: {reason}."
    return Recommendation(headline, tuple(sentences), chosen.label, best.label, gentle.label)


def recommend_point(sweep: Sweep) -> SweepRecommendation:
    scores = [*_scores(sweep, "target")]
    tests = [(s.name, s.metric) for _, s in scores]
    targets = {i: s for (i, s), test in zip(scores, tests, strict=True) if test == tests[0]}
    found = [_point(point, i, targets.get(i)) for i, point in enumerate(sweep.points)]
    advice = [NO_TESTS] if all(c.loss is None for c in found) else []
    if sweep.retain is not None or sweep.max_kl is not None:
        return _within_limits(sweep, found, targets, advice)
    # From the last: of two equally good ones, it is taken.
    finite = [c for c in reversed(found) if is_finite(c.target)]
    if not finite:
        reason = "its target score is not a finite number" if scores else "no target was tested"
        said = _said(sweep, found, None)
        return SweepRecommendation(f"No {_what(sweep)} is recommended: {reason}.", (*said, *advice))
    best = min(finite, key=lambda c: c.target)
    close = [c for c in finite if c.close_to(best)]
    chosen = found.index(_gentlest(close))
    what, test = _what(sweep), scores[0][1].name
    reason = _reason(close, what, _what(sweep, several=True), test, "stays closest to the base")
    if len(found) == 1:
        reason = f"it is the only {what} that was measured"
    elif len(finite) == 1:
        reason = f"no other {what} has a finite score on {plain(test)}"
    return SweepRecommendation(
        f"{_take(sweep.points[chosen])}: {reason}.",
        (*_said(sweep, found, chosen), *advice, _CONFIRM),
        sweep.points[chosen].settings,
    )


def _within_limits(
    sweep: Sweep, found: Sequence[Choice], targets: Mapping[int, Score], advice: Sequence[str]
) -> SweepRecommendation:
    limits, kept, kls = [], _kept(sweep), _context_free(sweep)
    if sweep.retain is not None and kept:
        limits.append(f"keeps {100 * sweep.retain:g} % of every retained score")
    if sweep.max_kl is not None and kls:
        limits.append(f"has a context-free divergence of at most {sweep.max_kl:g} nats per token")
    if not limits:
        return SweepRecommendation(
            f"No {_what(sweep)} is recommended: neither a retained score nor a context-free "
            "divergence was measured."
        )
    within = [
        i
        for i in range(len(found))
        if (sweep.retain is None or not kept or kept[i][0] >= sweep.retain)
        and (sweep.max_kl is None or not kls or kls[i] <= sweep.max_kl)
    ]
    said, what = " and ".join(limits), _what(sweep)
    if not within:
        nearest = []
        if kept and sweep.retain is not None:
            i = max(range(len(found)), key=lambda i: kept[i][0])
            share, test = kept[i]
            name = _name(sweep.points[i])
            nearest = [f"The nearest is {name}: it keeps {100 * share:.4g} % on {plain(test)}."]
        headline = f"No {what} {said}: keep the base, or try smaller changes of the weights."
        return SweepRecommendation(headline, (*nearest, *advice))
    finite = [i for i in within if is_finite(found[i].target)]
    of = f"of the {len(within)} (of {len(found)}) within the limit"
    if finite:
        chosen = min(finite, key=lambda i: (found[i].target, found[i].moved))
        reason = f"{of}, it is the best on {plain(targets[chosen].name)}"
    elif targets:
        return SweepRecommendation(
            f"No {what} is recommended: no target score within the limit is a finite number."
        )
    else:
        chosen = max(within, key=lambda i: found[i].moved)
        reason = f"{of}, it is farthest from the base (no target was tested)"
    return SweepRecommendation(
        f"{_take(sweep.points[chosen])}: it {said}, and {reason}.",
        (*_said(sweep, found, chosen), *advice, _CONFIRM),
        sweep.points[chosen].settings,
    )


def _scores(sweep: Sweep, role: str) -> Iterator[tuple[int, Score]]:
    for i, point in enumerate(sweep.points):
        yield from ((i, score) for score in point.report.scores if score.role == role)


def _kept(sweep: Sweep) -> list[tuple[float, str]]:
    """The least share of a retained score that each point keeps, and its test; empty if none."""
    worst = [(math.inf, "")] * len(sweep.points)
    for i, score in _scores(sweep, "retained"):
        before, after = score.before.value, score.after.value
        gain = before - after if score.lower_is_better else after - before
        share = 1 + gain / abs(before or 1.0) if is_finite(before, after) else -math.inf
        worst[i] = min(worst[i], (share, score.name))
    return worst if any(name for _, name in worst) else []


def _context_free(sweep: Sweep) -> list[float]:
    """The context-free divergence of each point, infinite where it is unknown; empty if none."""
    found = [
        next((d.kl.value for d in p.report.divergences if d.name == "context-free"), math.inf)
        for p in sweep.points
    ]
    found = [math.inf if math.isnan(kl) else kl for kl in found]
    return found if any(map(is_finite, found)) else []


def _what(sweep: Sweep, several: bool = False) -> str:
    """What the points of a sweep differ in: its setting, or its settings."""
    names = list(sweep.points[0].settings)
    return symbol(names[0]) if len(names) == 1 else "points" if several else "point"


def _name(point: SweepPoint) -> str:
    ends = {"base": "the base", "tuned": "the tuned model"}
    return ends.get(point.kind, settings_text(point.settings))


def _take(point: SweepPoint) -> str:
    name = _name(point)
    return f"Take {name}" if point.kind == "merged" else f"Keep {name}"


def _said(sweep: Sweep, found: Sequence[Choice], chosen: int | None) -> list[str]:
    """Sentences about the ends and the chosen point."""
    shown = [i for i, p in enumerate(sweep.points) if i == chosen or p.kind != "merged"]
    return [f"{found[i].label}: {found[i].says}" for i in shown if found[i].says]


def standard_of(found: Sequence[Summary]) -> Summary | None:
    """Plain fine-tuning, with the values that are best on the target, if it was run."""
    plain_ones = [s for s in found if s.recipe == STANDARD and is_finite(s.target.after)]
    return max(plain_ones, key=lambda s: s.target.gain, default=None)


def kl_of(summary: Summary, ignored: Collection[str] = ()) -> float | None:
    """How far its predictions moved: on the base's own texts if known, else on other inputs."""
    return next((kl for name, kl in summary.kl.items() if name not in ignored), None)


def _recipe(summary: Summary, signals: Collection[str]) -> Choice:
    target, kl = summary.target, kl_of(summary, signals)
    sign = 1 if target.lower_is_better else -1
    seeds = [sign * run.target.after for run in summary.runs if is_finite(run.target.after)]
    lost = f", lost {percent(summary.loss)} on average" if summary.retained else ""
    return Choice(
        summary.label,
        f"{_scored(target.metric, target.after, target.name)}{lost}.",
        sign * target.after,
        min(seeds, default=math.nan),
        max(seeds, default=math.nan),
        summary.loss if summary.retained else None,
        math.inf if kl is None else kl,
    )


def _point(point: SweepPoint, number: int, target: Score | None) -> Choice:
    value = low = high = math.nan
    says = []
    if target:
        says.append(f"{_scored(target.metric, target.after.value, target.name)}.")
        sign, change = 1 if target.lower_is_better else -1, change_of(target)
        value, high = sign * target.after.value, sign * change.value
        end = change.low if target.lower_is_better else change.high  # only the better end counts
        low = high if end is None else sign * end
    # Losses are on the scale of the verdict.
    retained = [score for score in point.report.scores if score.role == "retained"]
    losses = [max(0.0, change_of(score).loss) for score in retained]
    if losses and point.kind != "base":
        says.append(verdict(point.report).headline)
    loss = sum(losses) / len(losses) if losses else None
    drift, divergences = point.report.drift, point.report.divergences
    moved = float(number)
    if drift is not None or divergences:
        moved = drift.total.relative if drift is not None else divergences[0].kl.value
    name = _name(point)
    label = name if point.kind == "merged" else name.capitalize()
    return Choice(label, " ".join(says), value, low, high, loss, moved)


def _gentlest(among: Sequence[Choice]) -> Choice:
    if any(c.loss is not None for c in among):
        return min(among, key=lambda c: (c.loss or 0.0, c.target))
    return min(among, key=lambda c: (c.moved, c.target))


def _reason(close: Sequence[Choice], one: str, several: str, test: str, untested: str) -> str:
    if len(close) == 1:
        return f"no other {one} comes close on {plain(test)}"
    why = "forgets least" if any(c.loss is not None for c in close) else untested
    return f"of the {len(close)} {several} close to the best on {plain(test)}, it {why}"


def _scored(metric: str, value: float, test: str) -> str:
    return f"{score_text(metric, value)} {plain(metric)} on {plain(test)}"
