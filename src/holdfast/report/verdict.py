"""What a forgetting report says, in plain words.

A change counts as a loss only if its interval excludes 0. Drift of the weights or of the
predictions is not yet forgetting: without tests, forgetting is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from holdfast._torch.finite import is_finite
from holdfast.report.document import Answer
from holdfast.report.next_step import next_step
from holdfast.report.words import (
    Change,
    change_of,
    kind_of,
    listed,
    nats,
    percent,
    plain,
    score_text,
    share_kept,
    share_text,
)

if TYPE_CHECKING:
    from holdfast.evaluate.report import Divergence, Drift, ForgettingReport, Score, Vocabulary

Forgotten = Literal["nothing", "little", "some", "much", "unknown"]

#: How much was forgotten, in words.
GRADES: dict[Forgotten, str] = {
    "nothing": "Nothing forgotten",
    "little": "Little forgotten",
    "some": "Some forgotten",
    "much": "Much forgotten",
    "unknown": "Forgetting was not tested",
}
NO_TESTS = "To see what was forgotten, test tasks that the model should keep."
SHARED_ROWS = "Only the rows of tokens that both models have are compared."
MERGED_ROWS = "The rows of tokens that both models have are merged, the others are as tuned."
#: A KL below this, in nats, is rounding error.
_STILL = 1e-6
#: More tests than this are counted instead of named.
_FEW = 4
#: From this many tests on, some 95 % intervals exclude 0 by chance.
_MANY = 20
_DOUBT = "; without an interval this may be chance"


@dataclass(frozen=True)
class Verdict(Answer):
    """The answer of a forgetting report: the grade, what was learned, details, what to do next.

    Attributes:
        next: what to do next: a command, or that the model can be used.
        forgotten: the grade, by the worst loss. Little is below 1 point, 0.05 nats per token or 5 %
            of perplexity; much is at least 5 points, 0.25 nats per token or 28 %. For other metrics
            the limits are 2 and 10 % of the value before. ``"unknown"`` if it was not tested.
        kept: the mean over the scores of the retained tests of the share that is left, each at most
            1; None without tests. The share is after/before for a score of which more is better,
            before/after for a perplexity or an error, and e^(before − after) for a loss in nats per
            token, which is the ratio of the perplexities. A score of 0 or less does not count.
    """

    forgotten: Forgotten = "unknown"
    kept: float | None = None


class Judged(NamedTuple):
    name: str
    score: Score
    change: Change

    def __str__(self) -> str:
        return f"{self.change.amount} on {self.name}"


def verdict(report: ForgettingReport) -> Verdict:
    """Sum up a report.

    >>> from holdfast.evaluate.report import Estimate, ForgettingReport, Score
    >>> def at(value, margin): return Estimate(value, value - margin, value + margin, 1838)
    >>> piqa = Score("PIQA", "accuracy", False, at(0.684, 0.02), at(0.653, 0.02), at(-0.031, 0.01))
    >>> gsm = Score("GSM8K", "nll", True, at(4.6, 0.1), at(2.3, 0.1), at(-2.3, 0.1), "target")
    >>> print(verdict(ForgettingReport("base", "tuned", scores=(piqa, gsm))))
    Some forgotten: kept 95 % (worst: PIQA, −3.1 points).
    Learned: GSM8K loss 4.600 → 2.300.
    Next: holdfast merge base tuned --sweep 0.5 0.7 0.85 1 --out tuned-merged
    """
    names = [plain(score.name) for score in report.scores]
    judged = [
        Judged(f"{name} {plain(s.metric)}" if names.count(name) > 1 else name, s, change_of(s))
        for name, s in zip(names, report.scores, strict=True)
    ]
    judged.sort(key=lambda j: -abs(j.change.loss))
    retained = [j for j in judged if j.score.role == "retained"]
    targets = [j for j in judged if j.score.role == "target"]
    base, tuned = _defects(report, judged)
    forgotten, headline = _grade(report, retained)
    sentences = [
        *_learned(targets),
        *on_split(report.split),
        *_on_retained(retained, graded=not (base or tuned)),
        *_on_predictions(report.divergences),
        *(_on_weights(report.drift) if report.drift else ()),
    ]
    if not (report.scores or report.divergences or report.drift):
        sentences.append("Nothing was measured.")
    if base or tuned:
        first, *others = *base, *tuned
        return Verdict(first, (*others, *sentences), "unknown" if base else "much")
    after = "" if _is_same(report) else next_step(report, forgotten)
    return Verdict(headline, tuple(sentences), forgotten, _kept(retained), next=after)


def on_split(tests: Sequence[str]) -> list[str]:
    """Say which tests contain new tokens: the base's tokenizer, which both models use, splits them.

    >>> on_split(["calls"])[0][:52]
    'calls contains new tokens of the tuned model, which '
    """
    if not tests:
        return []
    names, contain = listed([plain(n) for n in tests]), "contains" if len(tests) == 1 else "contain"
    return [
        f"{names} {contain} new tokens of the tuned model, which both models read in pieces, with "
        "the base's tokenizer. The tuned model was not trained on these pieces: to test the tokens "
        "themselves, take the resized model before training as the base."
    ]


def source_of(divergence: Divergence) -> str:
    free = divergence.name == "context-free"
    return "the base model's own texts" if free else plain(divergence.name)


def no_evidence(inputs: str) -> str:
    """The sentence about a divergence that was a training signal.

    >>> no_evidence("its texts")
    'The divergence on its texts was a training signal: it is no evidence of retention.'
    """
    return f"The divergence on {inputs} was a training signal: it is no evidence of retention."


def _defects(report: ForgettingReport, judged: Sequence[Judged]) -> tuple[list[str], list[str]]:
    """Defects of the base and of the tuned model, which come before everything else."""
    drift = report.drift
    of_base = drift.base_not_finite if drift else ()
    of_tuned = [name for name in drift.not_finite if name not in of_base] if drift else []
    broken = [j for j in judged if j.change.outcome == "not finite"]
    by_base = [j.name for j in broken if not is_finite(j.score.before.value)]
    by_tuned = [j.name for j in broken if j.name not in by_base]
    odd = [source_of(d) for d in report.divergences if not is_finite(d.kl.value)]
    base = [*_not_finite("base", of_base), *_no_score("base", by_base)]
    tuned = [*_not_finite("tuned", of_tuned), *_no_score("tuned", by_tuned)]
    if odd and not base:
        tuned.append(f"The tuned model's divergence on {listed(odd)} is NaN or infinite.")
    return base, tuned


def _not_finite(which: str, tensors: Sequence[str]) -> list[str]:
    if not tensors:
        return []
    hold = "1 tensor holds" if len(tensors) == 1 else f"{len(tensors)} tensors hold"
    names = listed([plain(name) for name in tensors])
    return [f"The {which} model is broken: {hold} NaN or infinity ({names})."]


def _no_score(which: str, tests: Sequence[str]) -> list[str]:
    if not tests:
        return []
    where = listed(tests) if len(tests) <= _FEW else f"{len(tests)} tests"
    return [f"The {which} model gives NaN or infinity on {where}."]


def _grade(report: ForgettingReport, retained: Sequence[Judged]) -> tuple[Forgotten, str]:
    """The grade, and the headline with it."""
    finite = [j for j in retained if j.change.outcome != "not finite"]
    if lost := [j for j in retained if j.change.outcome == "lost"]:
        worst = lost[0].change
        forgotten: Forgotten = "little" if worst.loss < 1 else "some" if worst.loss < 2 else "much"
        where = f" (worst: {lost[0].name}, {worst.told})"
    elif any(j.change.outcome == "no interval" for j in finite):
        return "unknown", "The changes on the retained tests cannot be distinguished from chance."
    elif finite:
        forgotten, where = "nothing", f" (no measurable loss on {_named(finite)})"
    else:
        forgotten, where = "nothing" if _is_same(report) else "unknown", ""
    kept = _kept(retained)
    share = "" if kept is None else f": kept {share_text(kept)}"
    return forgotten, f"{GRADES[forgotten]}{share}{where}."


def _is_same(report: ForgettingReport) -> bool:
    """Whether the models are the same, in everything that was measured."""
    free = [d for d in report.divergences if not d.trained_on]
    still = report.drift is None or _is_still(report.drift)
    still = still and all(abs(d.kl.value) < _STILL for d in free)
    measured = bool(report.drift or free)
    return measured and still and all(score.change.value == 0 for score in report.scores)


def _kept(retained: Sequence[Judged]) -> float | None:
    return share_kept(
        (s.metric, s.lower_is_better, s.before.value, s.after.value) for _, s, _ in retained
    )


def _learned(targets: Sequence[Judged]) -> list[str]:
    """The targets in their own units, before and after, those that improved first."""
    notes = {
        "gained": "", "lost": " (worse)", "no interval": " (may be chance)",
        "no measurable change": " (no measurable change)",
    }  # fmt: skip
    said, before = [], ""
    for j in sorted(targets, key=lambda j: j.change.loss):
        if j.change.outcome == "not finite":
            continue
        metric = "loss" if kind_of(j.score.metric) == "nll" else plain(j.score.metric)
        values = (score_text(j.score.metric, at.value) for at in (j.score.before, j.score.after))
        name = "" if j.score.name == before else f"{plain(j.score.name)} "
        said.append(f"{name}{metric} {' → '.join(values)}{notes[j.change.outcome]}")
        before = j.score.name
    if not said:
        return []
    outcomes = {j.change.outcome for j in targets if j.change.loss < 0}
    learned = "Learned" if outcomes & {"gained", "no interval"} else "Nothing learned"
    return [f"{learned}: {'; '.join(said)}."]


def _losses(lost: Sequence[Judged], tests: int) -> str:
    """All losses. Changes of a perplexity are worded as increases."""
    if len(lost) > _FEW:
        return f"Lost on {len(lost)} of {tests} tests."
    rose = [str(j) for j in lost if j.change.kind == "perplexity"]
    rest = [str(j) for j in lost if j.change.kind != "perplexity"]
    if not rest:
        return f"Perplexity rose {listed(rose)}."
    return f"Lost {listed(rest)}{f'; perplexity rose {listed(rose)}' if rose else ''}."


def _on_retained(retained: Sequence[Judged], *, graded: bool) -> list[str]:
    """What the headline with the grade does not tell, or everything if there is none."""
    said = []
    same, gained, unsure, lost = (
        [j for j in retained if j.change.outcome == outcome]
        for outcome in ("no measurable change", "gained", "no interval", "lost")
    )
    if len(lost) > graded:
        said.append(_losses(lost, len(retained)))
    if same and (lost or unsure or not graded):
        said.append(f"No measurable change on {_named(same, margins=True)}.")
    tested = sum(j.change.low is not None for j in retained)
    if lost and tested >= _MANY:
        chance = max(1, round(0.025 * tested))
        said.append(f"By chance alone, about {chance} of {tested} tests would show a loss.")
    if gained:
        said.append(f"Improved by {listed(list(map(str, gained)))}.")
    for worse, word in ((True, "Worse"), (False, "Better")):
        if some := [str(j) for j in unsure if (j.change.loss > 0) == worse]:
            said.append(f"{word} by {listed(some)}{_DOUBT}.")
    return said


def _on_predictions(divergences: Sequence[Divergence]) -> list[str]:
    said = []
    moved = [d for d in divergences if abs(d.kl.value) >= _STILL and is_finite(d.kl.value)]
    if moved:
        sizes = [f"{nats(d.kl.value)} nats per {plain(d.per)} on {source_of(d)}" for d in moved]
        said.append(f"Predictions moved by {listed(sizes)}.")
    if trained := [source_of(d) for d in divergences if d.trained_on]:
        said.append(no_evidence(listed(trained)))
    return said


def _on_weights(drift: Drift) -> list[str]:
    said = []
    if _is_still(drift):
        said.append("The two models have the same weights.")
    elif drift.total.distance == 0 and not drift.not_finite:
        said.append("The weights that both models have did not move.")
    elif drift.total.distance > 0 and is_finite(drift.total.distance):
        most = max(drift.layers, key=lambda row: row.relative, default=None)
        where = f", most in {plain(most.name)} ({percent(most.relative)})" if most else ""
        said.append(f"The weights moved by {percent(drift.total.relative)} of their norm{where}.")
    if drift.vocabulary is not None:
        said.append(f"{on_tokens(drift.vocabulary)} {SHARED_ROWS}")
    for names, lacks in ((drift.only_base, "tuned"), (drift.only_tuned, "base")):
        if names:
            said.append(f"The {lacks} model lacks {listed([plain(name) for name in names])}.")
    return said


def on_tokens(vocabulary: Vocabulary) -> str:
    """Say how many tokens are new or missing, with their names.

    >>> from holdfast.evaluate.report import Vocabulary
    >>> on_tokens(Vocabulary(500, 502, ("<|tool|>", "<|end|>")))
    '2 tokens are new (<|tool|> and <|end|>).'
    >>> on_tokens(Vocabulary(500, 512, ("<|tool|>",)))
    '1 token is new (<|tool|>), and 11 more rows are padding.'
    >>> on_tokens(Vocabulary(512, 500))
    "The tuned model's vocabulary has 12 rows fewer."
    """
    new, more = vocabulary.new, vocabulary.tuned - vocabulary.base
    if not new:
        return (
            f"{_tokens(more)} new or padding."
            if more > 0
            else f"The tuned model's vocabulary has {-more} rows fewer."
        )
    said = f"{_tokens(len(new))} new ({listed([plain(token) for token in new])})"
    if more < 0:
        return f"{said}, and the tuned model's vocabulary has {-more} rows fewer."
    if more > len(new):
        return f"{said}, and {more - len(new)} more rows are padding."
    return f"{said}."


def _tokens(number: int) -> str:
    return "1 token is" if number == 1 else f"{number:,} tokens are"


def _is_still(drift: Drift) -> bool:
    """Whether both models have the same tensors with the same values."""
    odd = drift.only_base or drift.only_tuned or drift.not_finite or drift.vocabulary
    return drift.total.distance == 0 and not odd


def _named(judged: Sequence[Judged], margins: bool = False) -> str:
    if len(judged) > _FEW:
        return f"{len(judged)} tests"
    notes = [f" ({j.change.margin})" if margins and j.change.margin else "" for j in judged]
    return listed([j.name + note for j, note in zip(judged, notes, strict=True)])
