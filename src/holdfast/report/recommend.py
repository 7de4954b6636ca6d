"""Which recipe of a comparison to take, and which point of a sweep.

A comparison has a frontier, so no single recipe is right for everybody. Three choices are named:

1. *At the target of standard fine-tuning*: of the recipes that do as well as standard fine-tuning
   on the target, the one that forgets least. This is the one to take.
2. *Balanced*: of the recipes with at least 90 % of the best gain on the target, the one that
   forgets least.
3. *Best target*.

The definitions:

- Medians over seeds count. A recipe is a candidate if its target score is finite and better than
  the pretrained model's. Without a candidate, keep the pretrained model.
- A candidate does as well as another one if its target score is within 1 % of the other's (relative
  to it), or no worse than the other's worst seed with at least 90 % of the other's gain. A lucky
  seed of its own does not count, and one bad seed of the other does not make everything as good.
- The gain is the improvement over the pretrained model. A share of the best gain is a margin as in
  trials of non-inferiority: it is fixed in advance. No loss is weighed against a gain, because
  they have no common unit.
- To forget is the mean over the retained tests of the relative loss. A gain counts as no loss. A
  tie goes to the better target score. So no candidate beats a choice on both.
- Without retained tests, the recipe whose predictions moved least forgets least, by KL(base‖tuned)
  on inputs that no recipe was trained on and that are not the target's, where predictions are to
  change. Without such inputs, only the best target is known.
- If standard fine-tuning was not run, or did not improve the target, the best recipe takes its
  place.

A recipe that was chosen on other data (``Results.taken``) is to be taken regardless.

The rule for the points of a sweep is the first choice, with these differences: every point with a
finite target score is a candidate; it must do as well as the best one, which it also does if the
95 % interval of its gain over the base reaches the best gain; losses are on the scale of the
verdict (1 is where a loss stops being little). Without retained tests, take the one of them that is
nearest to the base. Without a target score there is no recommendation.

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
from holdfast.report.verdict import NO_TESTS, on_split, verdict
from holdfast.report.words import (
    change_of,
    kept,
    listed,
    nats,
    plain,
    reached,
    settings_text,
    symbol,
)

if TYPE_CHECKING:
    from holdfast.comparison.results import Results, Summary
    from holdfast.evaluate.report import Score
    from holdfast.evaluate.sweep import Sweep, SweepPoint

#: Relative distance to a target score at which another one is as good.
CLOSE = 0.01
#: Share of the best gain on the target that the balanced choice has at least.
NEAR = 0.9
#: The recipe that is plain fine-tuning.
STANDARD = "standard"

_CLOSEST = "moves the predictions least"
_BEST = "is the best"
_CONFIRM = "The choice was made on these samples: confirm it on others."


@dataclass(frozen=True)
class Recommendation(Answer):
    """The answer of a comparison: the recipe to take, and three choices of the frontier.

    Attributes:
        label: the recipe to take; None for the pretrained model.
        at_standard: the recipe that forgets least at the target of standard fine-tuning.
        balanced: the recipe that forgets least with at least 90 % of the best gain on the target.
        best: the recipe with the best target.
    """

    label: str | None = None
    at_standard: str | None = None
    balanced: str | None = None
    best: str | None = None


@dataclass(frozen=True)
class SweepRecommendation(Answer):
    """The answer of a sweep."""

    settings: dict[str, float] | None = None  # those to take; None without a recommendation


class Choice(NamedTuple):
    """A recipe or a point of a sweep. Less is better of all numbers."""

    label: str
    says: str  # its figures in words
    target: float  # the score; NaN without one
    reach: float  # the score that its data allow: the better end of an interval
    bar: float  # the score that does as well: of a recipe, its worst seed within limits
    loss: float | None  # None without retained tests
    moved: float  # the KL, or the distance from the base: decides without retained tests
    is_capped: bool = False  # whether the share of the gain limits the bar, not the worst seed

    def does_as_well_as(self, other: Choice) -> bool:
        return other.is_close(self.target) or self.reach <= other.bar

    def is_close(self, score: float) -> bool:
        return score - self.target <= CLOSE * abs(self.target)

    def margin(self, whose: str) -> str:
        """The margin of a recipe that does as well, in words."""
        within = f"within {100 * CLOSE:g} %"
        if self.is_close(self.bar):
            return within
        if self.is_capped:
            return f"{within}, or with at least {100 * NEAR:g} % of the gain of {whose}"
        return f"{within}, or no worse than the worst seed of {whose}"


def recommend(results: Results) -> Recommendation:
    summaries = results.summaries()
    total = len(results.failed) + len(results.runs)
    failed = [f"{len(results.failed)} of {total} runs failed."] if results.failed else []
    if not summaries:
        return Recommendation("No run has finished.", tuple(failed))
    start = summaries[0].target
    target = plain(start.name)
    signals = {start.name, *(name for s in summaries for name in s.trained_on)}
    found = {s.label: _recipe(s, signals) for s in summaries}
    gains = {s.label: s.target.gain for s in summaries}
    better = [c for c in found.values() if gains[c.label] > 0 and is_finite(c.target)]
    if not better:
        headline = f"Keep the pretrained model: no recipe made it better on {target}."
        return Recommendation(headline, tuple(failed))
    best = min(better, key=lambda c: (c.target, c.loss or 0.0))
    run = standard_of(summaries)
    standard = found[run.label] if run else None
    bar = standard if standard in better else None
    level = [c for c in better if c.does_as_well_as(bar or best)]
    near = [c for c in better if gains[c.label] >= NEAR * gains[best.label]]
    choices = _gentlest(level), _gentlest(near), best
    taken, several = found.get(results.taken or ""), len(found) > 1
    chosen = taken or choices[0]
    if taken:
        other = "standard fine-tuning" if bar else "the best"
        reason = f"on the data for choosing, it did as well as {other} and forgot least"
    elif several:
        if bar:
            others = {s.recipe for s in summaries if found[s.label] in level} - {STANDARD}
            reason = _beside_standard(level, len(others), target, bar.margin("standard"))
        else:
            among = f"recipes close to the best ({best.margin('the best')})"
            reason = _reason(level, "recipe", among, target)
    else:
        reason = f"it is the only recipe, and better than the pretrained model on {target}"
    roles = _roles(*choices, bar is not None) if several else {}
    sentences = [
        f"{plain(c.label)}{' ' * (c in roles)}{listed(roles.get(c, []))}: {c.says}"
        for c in dict.fromkeys((chosen, *choices))
    ]
    if standard and standard not in (chosen, *choices):
        sentences.append(f"Standard fine-tuning: {standard.says}")
    sentences.append(f"The pretrained model: {reached(start.name, start.metric, start.before)}.")
    if several and not (bar or taken):
        sentences.append(without_standard(ran=any(s.recipe == STANDARD for s in summaries)))
    sentences += failed
    if not any(s.retained for s in summaries):
        sentences.append(NO_TESTS)
    if several and all(s.seeds == 1 for s in summaries):
        sentences.append("Only one seed was run: small differences may be chance.")
    if several and not taken:
        sentences.append(_CONFIRM)
    headline, labels = f"Take {plain(chosen.label)}: {reason}.", [c.label for c in choices]
    return Recommendation(headline, tuple(sentences), chosen.label, *labels)


def recommend_point(sweep: Sweep) -> SweepRecommendation:
    scores = [*_scores(sweep, "target")]
    tests = [(s.name, s.metric) for _, s in scores]
    targets = {i: s for (i, s), test in zip(scores, tests, strict=True) if test == tests[0]}
    found = [_point(point, i, targets.get(i)) for i, point in enumerate(sweep.points)]
    advice = [NO_TESTS] if all(c.loss is None for c in found) else []
    if sweep.retain is not None or sweep.max_kl is not None:
        return _within_limits(sweep, found, targets, advice)
    split = on_split([n for n in sweep.points[-1].report.split if tests and n == tests[0][0]])
    # From the last: of two equally good ones, it is taken.
    finite = [c for c in reversed(found) if is_finite(c.target) and not split]
    if not finite:
        reason = "its target score is not a finite number" if scores else "no target was tested"
        if split:
            reason, advice = f"{plain(tests[0][0])} was read in pieces", [*split, *advice]
        said = _said(sweep, found, None)
        return SweepRecommendation(f"No {_what(sweep)} is recommended: {reason}.", (*said, *advice))
    best = min(finite, key=lambda c: c.target)
    level = [c for c in finite if c.does_as_well_as(best)]
    chosen = found.index(_gentlest(level))
    what, test = _what(sweep), plain(scores[0][1].name)
    among = f"{_what(sweep, several=True)} close to the best"
    reason = _reason(level, what, among, test, "stays closest to the base")
    if len(found) == 1:
        reason = f"it is the only {what} that was measured"
    elif len(finite) == 1:
        reason = f"no other {what} has a finite score on {test}"
    return SweepRecommendation(
        f"{_take(sweep.points[chosen])}: {reason}.",
        (*_said(sweep, found, chosen), *advice, _CONFIRM),
        sweep.points[chosen].settings,
    )


def _within_limits(
    sweep: Sweep, found: Sequence[Choice], targets: Mapping[int, Score], advice: Sequence[str]
) -> SweepRecommendation:
    limits, shares, kls = [], _shares(sweep), _context_free(sweep)
    if sweep.retain is not None and shares:
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
        if (sweep.retain is None or not shares or shares[i][0] >= sweep.retain)
        and (sweep.max_kl is None or not kls or kls[i] <= sweep.max_kl)
    ]
    said, what = " and ".join(limits), _what(sweep)
    if not within:
        nearest = []
        if shares and sweep.retain is not None:
            i = max(range(len(found)), key=lambda i: shares[i][0])
            share, test = shares[i]
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


def _shares(sweep: Sweep) -> list[tuple[float, str]]:
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
    if len(names) > 1:
        return "points" if several else "point"
    return f"values of {symbol(names[0])}" if several else symbol(names[0])


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
    score = reached(target.name, target.metric, target.after)
    says = [f"{score}.", *kept(summary.retained)]
    if not summary.retained and kl is not None:
        says.append(f"Its predictions moved by {nats(kl)} nats.")
    worst = max(seeds, default=math.nan)
    cap = sign * target.after + (1 - NEAR) * target.gain
    return Choice(
        summary.label,
        " ".join(says),
        target=sign * target.after,
        reach=sign * target.after,
        bar=min(worst, cap),
        loss=summary.loss if summary.retained else None,
        moved=math.inf if kl is None else kl,
        is_capped=cap < worst,
    )


def _point(point: SweepPoint, number: int, target: Score | None) -> Choice:
    value = reach = bar = math.nan
    says = []
    if target:
        after = target.after.value
        says.append(f"{reached(target.name, target.metric, after)}.")
        sign, change = 1 if target.lower_is_better else -1, change_of(target)
        value, bar = sign * after, sign * change.value
        end = change.low if target.lower_is_better else change.high  # only the better end counts
        reach = bar if end is None else sign * end
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
    return Choice(label, " ".join(says), value, reach, bar, loss, moved)


def _gentlest(among: Sequence[Choice]) -> Choice:
    if any(c.loss is not None for c in among):
        return min(among, key=lambda c: (c.loss or 0.0, c.target))
    return min(among, key=lambda c: (c.moved, c.target))


def _roles(
    at_standard: Choice, balanced: Choice, best: Choice, has_standard: bool
) -> dict[Choice, list[str]]:
    """What is said of each choice; one recipe may be several choices."""
    roles: dict[Choice, list[str]] = {}
    if (why := _why((at_standard, balanced))) != _BEST:
        where = "at the target of standard fine-tuning" if has_standard else "close to the best"
        roles.setdefault(at_standard, []).append(f"{why} {where}")
        share = f"{100 * NEAR:g} % of the best gain"
        roles.setdefault(balanced, []).append(f"is balanced ({why} with {share})")
    roles.setdefault(best, []).append("has the best target")
    return roles


def without_standard(*, ran: bool) -> str:
    """Say that the best recipe takes the place of standard fine-tuning."""
    why = "did not improve the target" if ran else "has no result"
    return f"Standard fine-tuning {why}: recipes are compared with the best."


def _reason(
    level: Sequence[Choice], one: str, among: str, test: str, closest: str = _CLOSEST
) -> str:
    if len(level) == 1:
        return f"no other {one} comes close on {test}"
    return f"of the {len(level)} {among} on {test}, it {_why(level, closest)}"


def _beside_standard(level: Sequence[Choice], others: int, test: str, margin: str) -> str:
    """The reason for one of the recipes that do as well as standard fine-tuning, and itself."""
    as_well = f"as well on {test} ({margin})"
    if not others:
        point = f", and of its settings it {_why(level)}" if len(level) > 1 else ""
        return f"no other recipe does {as_well}{point}"
    those = f"{others} recipes that do" if others > 1 else "one recipe that does"
    return f"of standard fine-tuning and the {those} {as_well}, it {_why(level)}"


def _why(among: Sequence[Choice], closest: str = _CLOSEST) -> str:
    if any(c.loss is not None for c in among):
        return "forgets least"
    return closest if any(is_finite(c.moved) for c in among) else _BEST
