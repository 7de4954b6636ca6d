"""Which recipe to take.

The rule, which no setting changes:

1. What counts are medians over seeds. A recipe is in question if its target is a finite number and
   better than the pretrained model's. Where there is none, the pretrained model is to be kept.
2. A recipe is *close* to the best if its target is within 1 % of the best one (relative to it), or
   if the range of its seeds' values overlaps with that of the best one's. Of several that are the
   best, it is the one that forgets least.
3. Of those, the one that forgets least: the mean over the retained tests of what was lost, as a
   share of the value before. A gain counts as no loss. Of equals, the best on the target.
4. Where nothing retained was tested, the one whose predictions moved least, by KL(base‖tuned).

A recipe that was chosen on other data (``Results.taken``) is the one to take whatever these say.
Beside it stand the best on the target, and the one that forgets least within 5 % of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.comparison.results import Measured, Results, Summary
from holdfast.report.comparison_words import change_in, seconds, share, short_change
from holdfast.report.words import level, listed, plain

__all__ = ["Recommendation", "recommend"]

#: What is as good as the best, and what is a little less good, relative to it.
CLOSE, NEAR = 0.01, 0.05


@dataclass(frozen=True)
class Recommendation:
    """The answer of a comparison.

    Attributes:
        label: the recipe to take; None where there is none.
        headline: one sentence.
        sentences: what else there is to say, the most important first.
        best: the best on the target.
        gentle: what forgets least within 5 % of the best.
    """

    label: str | None
    headline: str
    sentences: tuple[str, ...] = ()
    best: str | None = None
    gentle: str | None = None

    def __str__(self) -> str:
        return " ".join([self.headline, *self.sentences])


def recommend(results: Results) -> Recommendation:
    """Apply the rule, and say why."""
    found = results.summaries()
    if not found:
        return Recommendation(None, "No run is done.", tuple(_on_failures(results)))
    better = [s for s in found if math.isfinite(s.target.after) and s.target.gain > 0]
    if not better:
        name = plain(found[0].target.name)
        headline = f"Keep the pretrained model: no recipe made it better on {name}."
        return Recommendation(None, headline, tuple(_on_failures(results)))
    best = min(better, key=lambda s: (_from_the_top(s), s.loss))
    close = [s for s in better if _within(s, best, CLOSE) or _overlap(s, best)]
    near = [s for s in better if s in close or _within(s, best, NEAR)]
    chosen, gentle = _gentlest(close), _gentlest(near)
    elsewhere = next((s for s in found if s.label == results.taken), None)
    chosen = elsewhere or chosen
    standard = standard_of(found)
    return Recommendation(
        chosen.label,
        _headline(chosen, best, close, found)
        if elsewhere is None
        else f"Take {plain(chosen.label)}: on other data than is shown here it was within 1 % of "
        "the best, and of those it forgot least.",
        (
            *_on_target(chosen, best, standard),
            *_on_losses(chosen, standard),
            *_on_others(chosen, best, gentle),
            *_on_time(chosen, standard),
            *_on_failures(results),
            *_advice(found, elsewhere is not None),
        ),
        best.label,
        gentle.label,
    )


def standard_of(found: Sequence[Summary]) -> Summary | None:
    """Plain fine-tuning, with the values that are best on the target, if it was run."""
    plain_ones = [s for s in found if s.recipe == "standard" and math.isfinite(s.target.after)]
    return min(plain_ones, key=_from_the_top, default=None)


def kl_of(summary: Summary) -> float | None:
    """How far its predictions moved: on the base's own texts, else on the first there are."""
    return summary.kl.get("context-free", next(iter(summary.kl.values()), None))


def _from_the_top(summary: Summary) -> float:
    """Least for the best on the target."""
    return (1 if summary.target.lower_is_better else -1) * summary.target.after


def _within(summary: Summary, best: Summary, share: float) -> bool:
    top = best.target.after
    return abs(summary.target.after - top) <= share * abs(top)


def _overlap(one: Summary, other: Summary) -> bool:
    """Whether the ranges of their seeds' targets have a value in common."""
    values = [run.target.after for run in one.runs], [run.target.after for run in other.runs]
    known = [[value for value in some if math.isfinite(value)] for some in values]
    return all(known) and max(map(min, known)) <= min(map(max, known))


def _gentlest(among: Sequence[Summary]) -> Summary:
    if any(s.retained for s in among):
        return min(among, key=lambda s: (s.loss, _from_the_top(s)))
    moved = {s.label: math.inf if (kl := kl_of(s)) is None else kl for s in among}
    return min(among, key=lambda s: (moved[s.label], _from_the_top(s)))


def _headline(
    chosen: Summary, best: Summary, close: Sequence[Summary], found: Sequence[Summary]
) -> str:
    take, target = f"Take {plain(chosen.label)}", plain(best.target.name)
    last = "forgets least" if any(s.retained for s in close) else "moves the predictions least"
    if len(found) == 1:
        return f"{take}: it is the only recipe, and better than the pretrained model on {target}."
    if len(close) == 1:
        return f"{take}: no other recipe comes close on {target}."
    if chosen is best:
        return f"{take}: it is the best on {target}, and of those close to it, it {last}."
    if _within(chosen, best, CLOSE):
        return f"{take}: within 1 % of the best on {target}, it {last}."
    return f"{take}: as good as the best on {target} up to the seed, it {last}."


def _on_target(chosen: Summary, best: Summary, standard: Summary | None) -> list[str]:
    def at(value: float) -> str:
        return level(chosen.target.metric, value)

    others = {"the pretrained model": chosen.target.before}
    if standard is not None and standard not in (chosen, best):
        others = {"standard fine-tuning": standard.target.after, **others}
    if best is not chosen:
        others = {f"the best ({plain(best.label)})": best.target.after, **others}
    words = [f"{who} {at(value)}" for who, value in others.items()]
    first = next(iter(others))
    words[0] = f"{first} has {at(others[first])}"
    target = chosen.target
    return [
        f"On {plain(target.name)} it has {at(target.after)} {plain(target.metric)}; "
        f"{listed(words)}."
    ]


def _on_losses(chosen: Summary, standard: Summary | None) -> list[str]:
    """Each retained test, with standard fine-tuning beside it."""
    other = {} if standard is None or standard is chosen else _by_key(standard)
    said = []
    whose = "standard fine-tuning "
    for test in sorted(chosen.retained, key=lambda test: test.relative)[:3]:
        change = change_in(test)
        unit = change.unit.removeprefix("% ")
        words = f"{plain(test.name)} {short_change(change)} {unit}"
        if (same := other.get((test.name, test.metric))) is not None:
            words, whose = f"{words} ({whose}{short_change(change_in(same))})", ""
        said.append(words)
    more = len(chosen.retained) - len(said)
    rest = [f"{more} more lost less"] if more else []
    return [f"Retained: {'; '.join([*said, *rest])}."] if said else []


def _on_others(chosen: Summary, best: Summary, gentle: Summary) -> list[str]:
    """The runner-up on each side."""
    said = []
    if best is not chosen and chosen.retained:
        said.append(
            f"The best on {plain(best.target.name)}, {plain(best.label)}, lost "
            f"{share(best.loss)} on average over the tests, against {share(chosen.loss)} with "
            f"{plain(chosen.label)}."
        )
    if gentle is not chosen:
        value = level(gentle.target.metric, gentle.target.after)
        lost = f" and lost {share(gentle.loss)}" if gentle.retained else ""
        said.append(
            f"To forget still less, take {plain(gentle.label)}: it has {value} "
            f"on {plain(gentle.target.name)}{lost}."
        )
    return said


def _on_time(chosen: Summary, standard: Summary | None) -> list[str]:
    """If it takes much longer."""
    if standard is None or chosen.seconds < 1.5 * standard.seconds:
        return []
    times = seconds(chosen.seconds), seconds(standard.seconds)
    return [f"A run with it takes {times[0]}, with standard fine-tuning {times[1]}."]


def _on_failures(results: Results) -> list[str]:
    if not (failed := len(results.failed)):
        return []
    return [f"{failed} of {failed + len(results.runs)} runs failed."]


def _advice(found: Sequence[Summary], elsewhere: bool) -> list[str]:
    said = []
    if not any(s.retained for s in found):
        said.append("What was forgotten takes a test of tasks that it should have kept.")
    if len(found) > 1 and all(s.seeds == 1 for s in found):
        said.append("There was one seed: small differences may be chance.")
    if len(found) > 1 and not elsewhere:
        said.append("It was chosen on these very samples: confirm it on others.")
    return said


def _by_key(summary: Summary) -> dict[tuple[str, str], Measured]:
    return {(test.name, test.metric): test for test in summary.retained}
