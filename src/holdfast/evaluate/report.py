"""What a fine-tune cost, as data: figures with their uncertainty, and nothing about pictures.

A :class:`ForgettingReport` is made by :func:`holdfast.measure`, goes to JSON and comes back, and is
shown as Markdown, in a terminal or as a page.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holdfast.io import codec as _codec
from holdfast.report import forgetting
from holdfast.report.document import Document
from holdfast.report.shown import Shown
from holdfast.report.verdict import Verdict, verdict

__all__ = [
    "Curve",
    "Divergence",
    "Drift",
    "DriftRow",
    "Estimate",
    "ForgettingReport",
    "Score",
    "report_schema",
]

ROLES = ("retained", "target")

#: Of the JSON form. Raised when a field is renamed, removed or changes its meaning.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Estimate:
    """A figure, its 95 % bootstrap interval, and how many samples it rests on.

    ``low`` and ``high`` are None where the source gives no interval.
    """

    value: float
    low: float | None
    high: float | None
    n: int


@dataclass(frozen=True)
class Score:
    """One thing that both models were tested on.

    Attributes:
        name: what was tested: a file, a dataset or a task.
        metric: as its source names it: ``"nll"`` (nats per token), ``"perplexity"``,
            ``"accuracy"``, ``"exact_match"``, … Shares are in [0, 1].
        lower_is_better: whether less of it is better.
        before, after: of the base and of the tuned model.
        change: after − before, over the same samples (paired where the samples are known).
        role: ``"target"`` for what the model was tuned for, ``"retained"`` for the rest.
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
        name: on which inputs: a file's name, or ``"context-free"`` for texts that the base model
            itself wrote.
        kl: the mean over predictions; ``n`` counts sequences, which the interval resamples.
        predictions: how many predictions were compared.
        per: what a prediction is: ``"token"``, ``"masked token"`` or ``"sample"``.
        how: one line on the way it was measured.
    """

    name: str
    kl: Estimate
    predictions: int
    per: str
    how: str


@dataclass(frozen=True)
class DriftRow:
    """How far one tensor, layer or kind of parameter moved.

    Attributes:
        name: of the tensor, layer or kind.
        distance: ‖θ − θ*‖.
        norm: ‖θ*‖.
        size: the number of weights.
        layer, kind: of a tensor, which row of ``layers`` and ``kinds`` it counts to.
    """

    name: str
    distance: float
    norm: float
    size: int
    layer: str = ""
    kind: str = ""

    @property
    def relative(self) -> float:
        """Distance over norm; a thing that was zero and moved has moved infinitely."""
        if self.norm > 0:
            return self.distance / self.norm
        return float("inf") if self.distance > 0 else 0.0


@dataclass(frozen=True)
class Drift:
    """How far the weights moved, over those that both models have.

    Attributes:
        total: over all weights.
        layers: by layer, from the input to the output.
        kinds: by kind of parameter, such as ``self_attn.q_proj.weight``.
        tensors: by tensor.
        only_base, only_tuned: tensors that one of the models lacks, a new head for example.
        not_finite: tensors of the tuned model that hold NaN or infinity; they count as not moved.
    """

    total: DriftRow
    layers: tuple[DriftRow, ...]
    kinds: tuple[DriftRow, ...]
    tensors: tuple[DriftRow, ...]
    only_base: tuple[str, ...] = ()
    only_tuned: tuple[str, ...] = ()
    not_finite: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curve:
    """A figure over the steps of a training run."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.steps) != len(self.values):
            raise ValueError(
                f"the curve {self.name!r} has {len(self.steps)} steps and {len(self.values)} values"
            )


@dataclass(frozen=True)
class ForgettingReport(Shown):
    """What was measured of two models.

    Attributes:
        base, tuned: what they are called.
        drift: how far the weights moved.
        divergences: how far the predictions moved.
        scores: before and after on each thing that was tested.
        curves: over the steps of training, if it was watched.
        notes: what could not be measured and why, one sentence each.
        settings: how it was measured: seeds, numbers of samples, lengths.
        versions: of holdfast, torch and what else had a part in it.

    Example:
        >>> kl = Divergence("notes.txt", Estimate(0.08, 0.07, 0.09, n=64), 4096, "token", "")
        >>> report = ForgettingReport("base", "tuned", divergences=(kl,))
        >>> print(report.verdict().headline)
        Forgetting was not tested; predictions moved by 0.080 nats per token.
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
    settings: dict[str, str | int | float | bool | None] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def verdict(self) -> Verdict:
        """What was forgotten, in plain words."""
        return verdict(self)

    def to_json(self) -> str:
        """The report as JSON text, by the schema of :func:`report_schema`.

        NaN and infinity are the texts ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``, and come back
        as numbers; only in ``settings``, which hold text as well, they stay text.
        """
        return json.dumps(_codec.encode(self), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> ForgettingReport:
        """The report that :meth:`to_json` wrote; ValueError in one sentence for anything else."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a forgetting report: {error}") from None
        version = value.get("schema_version") if isinstance(value, dict) else None
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError("this is not a forgetting report: it has no schema_version")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"this report has schema_version {version}, and this holdfast reads up to "
                f"{SCHEMA_VERSION}: update holdfast to read it"
            )
        return _codec.decode(cls, value)

    def document(self) -> Document:
        """Verdict, plots and tables, in the form that all renderers show."""
        return forgetting.document(self)


def report_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of :meth:`ForgettingReport.to_json`."""
    schema = _codec.schema(ForgettingReport)
    schema["properties"]["schema_version"] = {"const": SCHEMA_VERSION}
    schema["$defs"]["Score"]["properties"]["role"] = {"enum": list(ROLES)}
    schema["required"].append("schema_version")
    return {"$id": f"urn:holdfast:forgetting-report:{SCHEMA_VERSION}", **schema}


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f'{name} is no JSON number: write "{name}"')
