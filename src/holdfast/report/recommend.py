"""What to take, by one rule: a recipe of a comparison, a point of a sweep, a model of a search.

Of the candidates that learned at least 95 % as much as the best one, take the one that forgot least
(:func:`choose`). To learn is to gain on the target, in the metric's own units. To forget is to lose
on the retained tests, on average over them and on the scale of the verdict: 1 is where a loss stops
being little (0.05 nats per token, 5 % of a perplexity, 1 point), and a gain is no loss. Of recipes,
medians over seeds count. Without retained tests, take the candidate that moved least: its
predictions, by KL on inputs that are not the target's and that no recipe was trained on; of a
sweep, its weights. Limits of a sweep only leave candidates out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from holdfast._torch.checks import positive_share
from holdfast._torch.finite import is_finite
from holdfast.report import LEARN_AT_LEAST
from holdfast.report.document import Answer
from holdfast.report.verdict import NO_TESTS, on_split, verdict
from holdfast.report.words import (
    Change,
    change_of,
    digits,
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

#: Shares for which the report says what would be taken.
SHARES = (0.9, 0.95, 0.98, 0.99)
#: What the figure means that is called "lost".
SCALE = (
    "Lost: the mean over the tests, where 1 is where a loss stops being little (0.05 nats per "
    "token, 5 % of a perplexity, 1 point) and 2 where it starts to be much."
)
#: The recipe that is plain fine-tuning.
STANDARD = "standard"

_NAMES = {STANDARD: "Standard fine-tuning", "the tuned model": "The tuned model"}
_CONFIRM = "The choice was made on these samples: confirm it on others."


class Candidate(NamedTuple):
    """A model that may be taken.

    Attributes:
        gain: improvement on the target over the pretrained model.
        loss: what it forgot; None without retained tests.
        moved: how far it is from the pretrained model, which decides if nothing has a loss.
        says: its figures in words.
    """

    label: str
    gain: float
    loss: float | None = None
    moved: float = math.inf
    says: str = ""


def choose(
    candidates: Iterable[Candidate], learn_at_least: float = LEARN_AT_LEAST
) -> Candidate | None:
    """The candidate to take; None if none has a gain. Of equals, the one that learned most.

    >>> found = [Candidate("standard", 2.00, 6.0), Candidate("holdfast", 1.98, 1.7)]
    >>> choose(found).label, choose(found, 0.995).label
    ('holdfast', 'standard')
    """
    level = learned(candidates, learn_at_least)
    tested = any(c.loss is not None for c in level)
    return min(level, key=lambda c: (_amount(c, tested), -c.gain), default=None)


def learned(candidates: Iterable[Candidate], share: float) -> list[Candidate]:
    """Those that have at least this share of the best gain."""
    positive_share("learn_at_least", share)
    gaining = [c for c in candidates if 0 < c.gain < math.inf]
    best = max((c.gain for c in gaining), default=0.0)
    return [c for c in gaining if c.gain >= share * best]


def _amount(c: Candidate, tested: bool) -> float:
    """How much a candidate forgot; infinity if that is unknown."""
    amount = c.loss if tested else c.moved
    return math.inf if amount is None or math.isnan(amount) else amount


def forgotten(changes: Iterable[Change]) -> float | None:
    """What a model forgot: the mean loss of its retained tests; None without them."""
    losses = [max(0.0, change.loss) for change in changes]
    return sum(losses) / len(losses) if losses else None


lost = partial(digits, places=2)


@dataclass(frozen=True)
class Recommendation(Answer):
    """What to take, and why.

    Attributes:
        label: the recipe, or the point of a sweep; None without a recommendation.
        best: the one that learned most.
        at: what would be taken if it had to learn at least another share as much as the best.
        settings: of a sweep, the settings to take; None without a recommendation.
    """

    label: str | None = None
    best: str | None = None
    at: dict[float, str] = field(default_factory=dict)
    settings: dict[str, float] | None = None

    @property
    def elsewhere(self) -> list[str]:
        """The sentence about other shares, if there was a choice."""
        shares: dict[str, list[str]] = {}
        for share, label in self.at.items():
            name = "the same" if label == self.label else plain(label)
            shares.setdefault(name, []).append(f"{100 * share:g}")
        said = ", ".join(f"{name} at {listed(some)} %" for name, some in shares.items())
        return [f"With another share: {said}."] if said else []


def recommend(
    results: Results,
    learn_at_least: float | None = None,
    nouns: tuple[str, str] = ("recipe", "recipes"),
) -> Recommendation:
    """The recipe of a comparison to take; ``nouns`` say what was compared."""
    share = results.learn_at_least if learn_at_least is None else learn_at_least
    summaries = results.summaries()
    total = len(results.failed) + len(results.runs)
    notes = [f"{len(results.failed)} of {total} runs failed."] if results.failed else []
    if not summaries:
        return Recommendation("No run has finished.", tuple(notes))
    start, several = summaries[0].target, len(summaries) > 1
    signals = {start.name, *(name for s in summaries for name in s.trained_on)}
    found = {s.label: _recipe(s, signals) for s in summaries}
    among, taken = [*found.values()], found.get(results.taken or "")
    chosen, best = taken or choose(among, share), choose(among, 1.0)
    standard = standard_of(summaries)
    others = best, found[standard.label] if standard else None
    before = f"The pretrained model: {reached(start.name, start.metric, start.before)}."
    if chosen is None or best is None:
        headline = f"Keep the pretrained model: no recipe made it better on {plain(start.name)}."
        figures = [*_figures(taken, others, None), before] if taken else []
        return Recommendation(headline, (*figures, *notes))
    if not any(s.retained for s in summaries):
        notes.append(NO_TESTS)
    if several and all(s.seeds == 1 for s in summaries):
        notes.append("Only one seed was run: small differences may be chance.")
    if several and not taken:
        notes.append(_CONFIRM)
    reason = "a search chose it on other samples"
    if not taken:
        reason = _reason(chosen, among, share, *nouns, "moved the predictions least")
    figures = [*_figures(chosen, others, best if several else None), before]
    return _taken(
        f"Take {plain(chosen.label)}: {reason}.", chosen, [] if taken else among, share, figures,
        notes, best=best.label, next=results.command(chosen.label) if chosen.gain > 0 else "",
    )  # fmt: skip


def recommend_point(sweep: Sweep, learn_at_least: float | None = None) -> Recommendation:
    """The point of a sweep to take: the base only if nothing else learned anything."""
    share = sweep.learn_at_least if learn_at_least is None else learn_at_least
    scores = [*_scores(sweep, "target")]
    tests = [(score.name, score.metric) for _, score in scores]
    targets = {i: s for (i, s), test in zip(scores, tests, strict=True) if test == tests[0]}
    test = plain(tests[0][0]) if tests else ""
    found = [_point(point, i, targets.get(i)) for i, point in enumerate(sweep.points)]
    rows = [*zip(found, (point.kind for point in sweep.points), strict=True)]
    tuned = next((c for c, kind in rows if kind == "tuned" and c.says), None)
    base = [f"The base: {c.says}" for c, kind in rows if kind == "base" and c.says][:1]
    ends = [f"The tuned model: {tuned.says}", *base] if tuned else base
    notes = [NO_TESTS] if all(c.loss is None for c in found) else []
    names = [symbol(name) for name in sweep.points[0].settings]
    one, many = (names[0], f"values of {names[0]}") if len(names) == 1 else ("point", "points")
    limits, within = _within_limits(sweep)
    merged = [i for i in within if rows[i][1] != "base"]
    among = [found[i] for i in merged]
    chosen, best = choose(among, share), choose(among, 1.0)
    split = on_split([n for n in sweep.points[-1].report.split if tests and n == tests[0][0]])
    if limits == "":
        why = "neither a retained score nor a context-free divergence was measured"
        return Recommendation(f"No {one} is recommended: {why}.")
    base_settings = next((p.settings for p in sweep.points if p.kind == "base"), None)
    if not within or (limits and not merged and not targets):
        headline = f"No {one} {limits}: keep the base, or try smaller changes of the weights."
        settings = base_settings if within else None
        return Recommendation(headline, (*_nearest(sweep), *notes), settings=settings)
    one, many = (noun + " within the limit" * bool(limits) for noun in (one, many))
    if limits and not targets:
        chosen, among = max(among, key=lambda c: c.moved), []
        total = sum(kind != "base" for _, kind in rows)
        these = f"the {len(merged)} (of {total}) within the limit"
        reason = f"of {these}, it is farthest from the base (no target was tested)"
    elif split or not any(is_finite(found[i].gain) for i in within):
        why = "its target score is not a finite number" if targets else "no target was tested"
        why = f"{test} was read in pieces" if split else why
        return Recommendation(f"No {one} is recommended: {why}.", (*ends, *split, *notes))
    elif chosen is None:
        headline = f"Keep the base: no {one} made it better on {test}."
        return Recommendation(headline, (*ends, *notes), settings=base_settings)
    else:
        reason = _reason(chosen, among, share, one, many, "stayed closest to the base")
    point = sweep.points[found.index(chosen)]
    take = f"Take {chosen.label}" if point.kind == "merged" else f"Keep {chosen.label}"
    limited = f"it {limits}, and " if limits else ""
    figures = _figures(chosen, (best, tuned), best if len(among) > 1 else None)
    return _taken(
        f"{take}: {limited}{reason}.", chosen, among, share, [*figures, *base],
        [*notes, _CONFIRM], best=best.label if best else None, settings=point.settings,
        next=sweep.command(point),
    )  # fmt: skip


def standard_of(found: Sequence[Summary]) -> Summary | None:
    """Plain fine-tuning, with the values that are best on the target, if it was run."""
    plain_ones = [s for s in found if s.recipe == STANDARD and is_finite(s.target.after)]
    return max(plain_ones, key=lambda s: s.target.gain, default=None)


def kl_of(summary: Summary, ignored: Collection[str] = ()) -> float | None:
    """How far its predictions moved: on the base's own texts if known, else on other inputs."""
    return next((kl for name, kl in summary.kl.items() if name not in ignored), None)


def _recipe(summary: Summary, signals: Collection[str]) -> Candidate:
    target, kl = summary.target, kl_of(summary, signals)
    says = [f"{reached(target.name, target.metric, target.after)}.", *kept(summary.retained)]
    if not summary.retained and kl is not None:
        says.append(f"Its predictions moved by {nats(kl)} nats.")
    loss, moved = summary.loss if summary.retained else None, math.inf if kl is None else kl
    return Candidate(summary.label, target.gain, loss, moved, " ".join(says))


def _point(point: SweepPoint, number: int, target: Score | None) -> Candidate:
    says, gain, report = [], math.nan, point.report
    if target:
        says.append(f"{reached(target.name, target.metric, target.after.value)}.")
        gain = -target.change.value if target.lower_is_better else target.change.value
    loss = forgotten(change_of(score) for score in report.scores if score.role == "retained")
    if loss is not None and point.kind != "base":
        says.append(verdict(report).headline)
    drift, moved = report.drift, float(number)
    if drift is not None or report.divergences:
        moved = drift.total.relative if drift is not None else report.divergences[0].kl.value
    return Candidate(_name(point), gain, loss, moved, " ".join(says))


def _taken(
    headline: str,
    chosen: Candidate,
    among: Sequence[Candidate],
    share: float,
    figures: Sequence[str],
    notes: Sequence[str],
    **more: Any,
) -> Recommendation:
    others = SHARES if len(among) > 1 else ()
    at = {s: c.label for s in others if s != share and (c := choose(among, s))}
    shown = Recommendation(headline, label=chosen.label, at=at, **more)
    return replace(shown, sentences=(*figures, *shown.elsewhere, *notes))


def _reason(
    chosen: Candidate, among: Sequence[Candidate], share: float, one: str, many: str, closest: str
) -> str:
    """Why a candidate is taken; ``closest`` says what counts without retained tests."""
    level, best = learned(among, share), choose(among, 1.0)
    if len(among) == 1:
        return f"it is the only {one}, and better than the pretrained model"
    if len(level) == 1 or best is None:
        return f"no other {one} learned at least {100 * share:g} % as much"
    tested = any(c.loss is not None for c in level)
    amounts = [_amount(c, tested) for c in level]
    why = "learned most"
    if amounts.count(least := min(amounts)) > 1 and least < math.inf:
        why = f"{why} of those that {'forgot least' if tested else closest}"
    elif least < math.inf:
        why = ("forgot least" if tested else closest) + " and learned most" * (chosen == best)
    whose = "" if chosen == best else f" ({plain(best.label)})"
    enough = f"{many} that learned at least {100 * share:g} % as much as the best{whose}"
    return f"of the {len(level)} {enough}, it {why}"


def _figures(
    chosen: Candidate, others: Sequence[Candidate | None], best: Candidate | None
) -> list[str]:
    """The figures of each; with a best one, its share of the gain, and what it lost."""
    lines = []
    for c in filter(None, dict.fromkeys((chosen, *others))):
        if not c.says:
            continue
        said = ""
        if best is not None:
            said = " learned most" if c == best else " did not improve the target"
            if c != best and c.gain > 0:
                said = f" learned {digits(100 * c.gain / best.gain, 1)} % as much as the best"
            if c != chosen and c.loss is not None and chosen.loss is not None:
                than = (c.loss > chosen.loss) - (c.loss < chosen.loss)
                said += f" and forgot {('as much', 'more', 'less')[than]}"
            said += "" if c.loss is None else f" (lost {lost(c.loss)})"
        lines.append(f"{_NAMES.get(c.label, plain(c.label))}{said}: {c.says}")
    return lines


def _scores(sweep: Sweep, role: str) -> Iterator[tuple[int, Score]]:
    for i, point in enumerate(sweep.points):
        yield from ((i, score) for score in point.report.scores if score.role == role)


def _within_limits(sweep: Sweep) -> tuple[str | None, list[int]]:
    """The limits in words, empty if they were not measured, None without any; the points within."""
    limits, within = [], [*range(len(sweep.points))]
    if sweep.retain is not None and (shares := _shares(sweep)):
        limits.append(f"keeps {100 * sweep.retain:g} % of every retained score")
        within = [i for i in within if shares[i][0] >= sweep.retain]
    if sweep.max_kl is not None and (kls := _context_free(sweep)):
        limits.append(f"has a context-free divergence of at most {sweep.max_kl:g} nats per token")
        within = [i for i in within if kls[i] <= sweep.max_kl]
    unlimited = sweep.retain is None and sweep.max_kl is None
    return None if unlimited else " and ".join(limits), within


def _nearest(sweep: Sweep) -> list[str]:
    """The point that keeps most, if none is within the limits."""
    others = [i for i, point in enumerate(sweep.points) if point.kind != "base"]
    if sweep.retain is None or not others or not (shares := _shares(sweep)):
        return []
    i = max(others, key=lambda i: shares[i][0])
    (share, test), name = shares[i], _name(sweep.points[i])
    return [f"The nearest is {name}: it keeps {100 * share:.4g} % on {plain(test)}."]


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


def _name(point: SweepPoint) -> str:
    ends = {"base": "the base", "tuned": "the tuned model"}
    return ends.get(point.kind, settings_text(point.settings))
