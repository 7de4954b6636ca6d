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
from holdfast.report.words import Change, change_of, listed, nats, percent, plain

if TYPE_CHECKING:
    from holdfast.evaluate.report import Divergence, Drift, ForgettingReport, Score, Vocabulary

Forgotten = Literal["nothing", "little", "some", "much", "unknown"]

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
    """The answer of a forgetting report.

    Attributes:
        forgotten: how much, by the worst loss. Little is below 1 point, 0.05 nats per token or 5 %
            of perplexity; much is at least 5 points, 0.25 nats per token or 28 %. For other metrics
            the limits are 2 and 10 % of the value before. ``"unknown"`` if it was not tested.
    """

    forgotten: Forgotten = "unknown"


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
    >>> arc = Score("ARC-easy", "accuracy", False, at(0.58, 0.02), at(0.58, 0.02), at(0.0, 0.008))
    >>> print(verdict(ForgettingReport("base", "tuned", scores=(piqa, arc))))
    Lost 3.1 points on PIQA.
    No measurable change on ARC-easy (±0.8 points).
    """
    names = [plain(score.name) for score in report.scores]
    judged = [
        Judged(f"{name} {plain(s.metric)}" if names.count(name) > 1 else name, s, change_of(s))
        for name, s in zip(names, report.scores, strict=True)
    ]
    judged.sort(key=lambda j: -abs(j.change.loss))
    retained = [j for j in judged if j.score.role == "retained"]
    base, tuned = _defects(report, judged)
    headline, forgotten = _headline(report, retained)
    sentences = [
        *on_split(report.split),
        *_on_retained(retained),
        *_on_targets([j for j in judged if j.score.role == "target"]),
        *_on_predictions(report.divergences),
        *(_on_weights(report.drift) if report.drift else ()),
    ]
    if not (report.scores or report.divergences or report.drift):
        sentences.append("Nothing was measured.")
    elif not retained and forgotten == "unknown":
        sentences.append(NO_TESTS)
    if base or tuned:
        defects = [*base, *tuned]
        finite = [headline] if any(j.change.outcome != "not finite" for j in retained) else []
        said = (*defects[1:], *finite, *sentences)
        return Verdict(defects[0], said, "unknown" if base else "much")
    return Verdict(headline, tuple(sentences), forgotten)


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


def _headline(report: ForgettingReport, retained: Sequence[Judged]) -> tuple[str, Forgotten]:
    if lost := [j for j in retained if j.change.outcome == "lost"]:
        worst = lost[0].change.loss
        forgotten: Forgotten = "little" if worst < 1 else "some" if worst < 2 else "much"
        return _losses(lost, len(retained)), forgotten
    drift = report.drift
    divergences = [d for d in report.divergences if not d.trained_on]
    still = drift is None or _is_still(drift)
    still = still and all(abs(d.kl.value) < _STILL for d in divergences)
    if (drift or divergences) and still and all(s.change.value == 0 for s in report.scores):
        return "Nothing forgotten.", "nothing"
    retained = [j for j in retained if j.change.outcome != "not finite"]
    if any(j.change.outcome == "no interval" for j in retained):
        return "The changes on the retained tests cannot be distinguished from chance.", "unknown"
    if retained:
        return f"No measurable loss on {_named(retained)}.", "nothing"
    return "Forgetting was not tested.", "unknown"


def _losses(lost: Sequence[Judged], tests: int) -> str:
    """The losses. Changes of a perplexity are worded as increases."""
    if len(lost) > _FEW:
        worst = f"{lost[0].name} ({lost[0].change.amount})"
        return f"Lost on {len(lost)} of {tests} tests, most on {worst}."
    rose = [str(j) for j in lost if j.change.kind == "perplexity"]
    rest = [str(j) for j in lost if j.change.kind != "perplexity"]
    if not rest:
        return f"Perplexity rose {listed(rose)}."
    return f"Lost {listed(rest)}{f'; perplexity rose {listed(rose)}' if rose else ''}."


def _on_retained(retained: Sequence[Judged]) -> list[str]:
    said = []
    same, gained, unsure, lost = (
        [j for j in retained if j.change.outcome == outcome]
        for outcome in ("no measurable change", "gained", "no interval", "lost")
    )
    if same:
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


def _on_targets(targets: Sequence[Judged]) -> list[str]:
    said = []
    for j in targets:
        moved = f"{'got worse' if j.change.loss > 0 else 'improved'} by {j.change.amount}"
        if j.change.outcome == "no measurable change":
            said.append(f"No measurable change on the target {_named([j], margins=True)}.")
        elif j.change.outcome != "not finite":
            doubt = _DOUBT if j.change.outcome == "no interval" else ""
            said.append(f"The target {j.name} {moved}{doubt}.")
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
