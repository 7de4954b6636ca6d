"""The forgetting report as data: figures with their uncertainty.

:func:`holdfast.measure` returns a :class:`ForgettingReport`. It is saved as JSON and loaded again,
and shown as Markdown, in a terminal or as a page. ``docs/schema`` holds the JSON Schema.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

from holdfast.report import forgetting
from holdfast.report.document import Document
from holdfast.report.shown import Shown
from holdfast.report.verdict import Verdict, verdict

ROLES = ("retained", "target")


@dataclass(frozen=True)
class Estimate:
    """A figure, its 95 % bootstrap interval, and its number of samples.

    ``low`` and ``high`` are None if the source gives no interval.
    """

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Score:
    """The result of one test, before and after.

    Attributes:
        name: the name of the test: a file, a dataset or a task.
        metric: as its source names it: ``"nll"`` (nats per token), ``"perplexity"``,
            ``"accuracy"``, ``"exact_match"``, … Shares are in [0, 1].
        lower_is_better: whether a lower value is better.
        before, after: the values of the base and of the tuned model.
        change: after − before on the same samples (paired if the samples are known).
        role: ``"target"`` for the task that the model was tuned for, else ``"retained"``.
    """

    name: str
    metric: str
    lower_is_better: bool
    before: Estimate
    after: Estimate
    change: Estimate
    role: str = "retained"

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ValueError(f"role must be 'retained' or 'target', got {self.role!r}")


@dataclass(frozen=True)
class Divergence:
    """KL(base‖tuned) between the predictions of the two models, in nats per prediction.

    Attributes:
        name: the name of the inputs, or ``"context-free"`` for texts that the base generated.
        kl: the mean over predictions; ``n`` counts sequences, which the interval resamples.
        predictions: the number of compared predictions.
        per: the unit of a prediction: ``"token"``, ``"masked token"`` or ``"sample"``.
        how: one line on how it was measured.
        trained_on: whether the tuned model was trained to keep its predictions on such inputs. The
            divergence is then no evidence of retention.
    """

    name: str
    kl: Estimate
    predictions: int
    per: str
    how: str
    trained_on: bool = False


@dataclass(frozen=True)
class DriftRow:
    """How far one tensor, layer or kind of parameter moved.

    Attributes:
        name: the name of the tensor, layer or kind.
        distance: ‖θ − θ*‖.
        norm: ‖θ*‖.
        size: the number of weights.
        layer, kind: for a tensor, the names of its rows in ``layers`` and ``kinds``.
    """

    name: str
    distance: float
    norm: float
    size: int
    layer: str = ""
    kind: str = ""

    @property
    def relative(self) -> float:
        """Distance over norm; infinite if weights that were all zero moved."""
        if self.norm > 0:
            return self.distance / self.norm
        return float("inf") if self.distance > 0 else 0.0


@dataclass(frozen=True)
class Vocabulary:
    """The vocabularies of two models that differ in their number of tokens.

    Attributes:
        base, tuned: the number of rows of the token embedding, with those that pad it.
        new: the tokens that only the tuned model's tokenizer has, if both tokenizers are known.
    """

    base: int
    tuned: int
    new: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drift:
    """How far the weights moved, over those that both models have.

    Attributes:
        total: all weights.
        layers: one row per layer, from the input to the output.
        kinds: one row per kind of parameter, such as ``self_attn.q_proj.weight``.
        tensors: one row per tensor.
        only_base, only_tuned: tensors that only one model has, such as a new head.
        not_finite: tensors with NaN or infinity in either model; they count as not moved.
        base_not_finite: those of them that hold NaN or infinity in the base.
        vocabulary: the numbers of tokens, if the models differ in them. Of tensors with a row per
            token, the first rows count, which both models have.
    """

    total: DriftRow
    layers: tuple[DriftRow, ...]
    kinds: tuple[DriftRow, ...]
    tensors: tuple[DriftRow, ...]
    only_base: tuple[str, ...] = ()
    only_tuned: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()
    base_not_finite: tuple[str, ...] = ()
    vocabulary: Vocabulary | None = None


@dataclass(frozen=True)
class Curve:
    """A figure over the steps of a training run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            counts = f"{len(self.steps)} steps and {len(self.values)} values"
            raise ValueError(f"the curve {self.name!r} has {counts}")


@dataclass(frozen=True, repr=False)
class ForgettingReport(Shown):
    """The comparison of a tuned model with its base.

    Attributes:
        base, tuned: the names of the models.
        drift: how far the weights moved.
        divergences: how far the predictions moved.
        scores: the results of the tests, before and after.
        curves: figures over the steps of training, if it was watched.
        notes: what could not be measured and why, one sentence each.
        split: tests that contain new tokens of the tuned model, which both models read in pieces.
        settings: how it was measured: seeds, numbers of samples, lengths.
        versions: versions of holdfast, torch and the other packages involved.

    Example:
        >>> kl = Divergence("notes.txt", Estimate(0.08, 0.07, 0.09, n=64), 4096, "token", "")
        >>> report = ForgettingReport("base", "tuned", divergences=(kl,))
        >>> print(report.verdict().headline)
        Forgetting was not tested.
        >>> ForgettingReport.from_json(report.to_json()) == report
        True
    """

    base: str
    tuned: str
    drift: Drift | None = None
    divergences: tuple[Divergence, ...] = ()
    scores: tuple[Score, ...] = ()
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = 1
    what: ClassVar[str] = "forgetting report"

    def verdict(self) -> Verdict:
        """What was forgotten, in plain words."""
        return verdict(self)

    def measured(self) -> "ForgettingReport":
        """The report itself: a model card's metadata takes its scores."""
        return self

    def rows(self) -> list[dict[str, Any]]:
        """One row per test."""
        return [
            {
                "test": score.name, "metric": score.metric, "role": score.role,
                "before": score.before.value, "after": score.after.value,
                "change": score.change.value, "low": score.change.low, "high": score.change.high,
                "n": score.change.n,
            }
            for score in self.scores
        ]  # fmt: skip

    def document(self) -> Document:
        """Verdict, plots and tables, in the form that all renderers show."""
        return forgetting.document(self)
