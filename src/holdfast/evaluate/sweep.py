"""WiSE-FT at several α, measured: how much is learned and how much forgotten between two models.

    found = sweep("models/base", "runs/tuned", text=["wiki.txt"], target="gsm8k.jsonl")
    found.recommendation().alpha, found.save("sweep.html")

θ = α·θ₁ + (1−α)·θ* costs no training, so the best α is found by trying (Wortsman et al.,
https://arxiv.org/abs/2109.01903).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from holdfast._torch.checks import share
from holdfast.evaluate.measure import measure_many
from holdfast.evaluate.report import ForgettingReport
from holdfast.io import codec as _codec
from holdfast.io.merge import merge_on_disk
from holdfast.io.models import Loader, ModelSource
from holdfast.report import sweep as _shown
from holdfast.report.document import Document
from holdfast.report.recommend import AlphaRecommendation, recommend_alpha
from holdfast.report.shown import Shown

__all__ = ["Sweep", "SweepPoint", "sweep"]

#: Of the JSON form. Raised when a field is renamed, removed or changes its meaning.
SCHEMA_VERSION = 1
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SweepPoint:
    """The model at one α, beside the base.

    Attributes:
        alpha: the share of the tuned weights; 0 is the base and 1 the tuned model.
        report: what was measured of it.
    """

    alpha: float
    report: ForgettingReport

    def __post_init__(self) -> None:
        share("alpha", self.alpha)


@dataclass(frozen=True)
class Sweep(Shown):
    """What was measured between a base and a tuned model.

    Attributes:
        base, tuned: what they are called.
        points: by α, from the base to the tuned model.
    """

    base: str
    tuned: str
    points: tuple[SweepPoint, ...]
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        alphas = [point.alpha for point in self.points]
        if not alphas or alphas != sorted(set(alphas)):
            raise ValueError("a sweep has at least one point, and its α increase")

    def recommendation(self) -> AlphaRecommendation:
        """Which α to take, and why, by the rule of :mod:`holdfast.report.recommend`."""
        return recommend_alpha(self)

    def to_json(self) -> str:
        """The sweep as JSON text; each point's report is as :class:`ForgettingReport` writes it."""
        return json.dumps(_codec.encode(self), ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Sweep:
        """The sweep that :meth:`to_json` wrote; ValueError in one sentence for anything else."""
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is not the JSON of a sweep: {error}") from None
        version = value.get("schema_version") if isinstance(value, dict) else None
        if type(version) is not int or version < 1 or "points" not in value:
            raise ValueError("this is not a sweep: it has no schema_version or no points")
        if version > SCHEMA_VERSION:
            raise ValueError(
                f"this sweep has schema_version {version}, and this holdfast reads up to "
                f"{SCHEMA_VERSION}: update holdfast to read it"
            )
        return _codec.decode(cls, value, "the sweep")

    def document(self) -> Document:
        """Recommended α, frontier and table, in the form that all renderers show."""
        return _shown.document(self)


def sweep(
    base: ModelSource,
    tuned: ModelSource,
    alphas: Sequence[float] = ALPHAS,
    *,
    out: str | os.PathLike[str] | None = None,
    keep: bool = False,
    overwrite: bool = False,
    drift: bool = True,
    loader: Loader | None = None,
    progress: bool = True,
    **tests: Any,
) -> Sweep:
    """Measure the models between a base and a tuned one.

    The base is asked once. One merged checkpoint is on disk and one model in memory at a time; the
    two ends are measured where they are.

    Args:
        base: a directory or a file of the pretrained model.
        tuned: the same of the tuned model, or a LoRA adapter.
        alphas: the shares of the tuned weights, from 0 to 1.
        out: where merged checkpoints are written; None takes the system's temporary directory.
        keep: leave them there, in ``out/alpha-0.25`` and so on.
        overwrite: replace those that are there.
        drift, loader, progress: as for :func:`holdfast.measure`.
        tests: the tests, with the names of :func:`holdfast.measure`: ``text``, ``data``, …

    Example:
        >>> import torch
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     base, tuned = f"{folder}/base.safetensors", f"{folder}/tuned.safetensors"
        ...     save_file({"w": torch.zeros(4)}, base)
        ...     save_file({"w": torch.ones(4)}, tuned)
        ...     found = sweep(base, tuned, [0, 0.5, 1], progress=False)
        >>> [point.report.drift.total.distance for point in found.points]
        [0.0, 1.0, 2.0]
    """
    wanted = sorted({share("alpha", alpha) for alpha in alphas})
    if not wanted:
        raise ValueError("a sweep needs at least one α, such as 0, 0.5 and 1")
    if keep and out is None:
        raise ValueError("out= must say where to keep the merged checkpoints")
    # What lies between comes first: models that cannot be merged are told before any is asked.
    order = sorted(wanted, key=lambda alpha: (alpha in (0, 1), alpha))
    if isinstance(base, nn.Module) or isinstance(tuned, nn.Module):
        raise ValueError(
            "a sweep is over checkpoints on disk: save the model with save_pretrained, and pass "
            "its directory"
        )
    merging = {
        "overwrite": overwrite,
        "allow_pickle": loader is not None and loader.allow_pickle,
        "progress": progress,
    }
    with contextlib.ExitStack() as stack:
        if out is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
        else:
            folder = os.fspath(out)
        models = _models(base, tuned, order, Path(folder), keep, merging)
        reports = measure_many(base, models, drift=drift, loader=loader, progress=progress, **tests)
        for opened in (models, reports):  # to be left in the other order
            stack.enter_context(contextlib.closing(opened))
        points = [SweepPoint(a, report) for a, report in zip(order, reports, strict=True)]
    return Sweep(str(base), str(tuned), tuple(sorted(points, key=lambda point: point.alpha)))


def _models(
    base: ModelSource,
    tuned: ModelSource,
    alphas: Sequence[float],
    folder: Path,
    keep: bool,
    merging: dict[str, bool],
) -> Generator[tuple[str, ModelSource | None], None, None]:
    """The models at each α by name, made when they are asked for and removed afterwards."""
    for alpha in alphas:
        if alpha == 0:
            yield str(base), None
        elif alpha == 1:
            yield str(tuned), tuned
        else:
            name = f"alpha-{alpha}" if keep else f".alpha-{alpha}.{os.getpid()}.tmp"
            try:
                merge_on_disk(base, tuned, folder / name, alpha, **merging)
                yield f"{tuned}, α = {alpha:g}", folder / name
            finally:
                if not keep:
                    shutil.rmtree(folder / name, ignore_errors=True)
