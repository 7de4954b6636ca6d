"""Interpolate between a base and a tuned model at several α, and measure each model.

    found = sweep("models/base", "runs/tuned", text=["wiki.txt"], target="gsm8k.jsonl")
    found.recommendation().alpha, found.save("sweep.html")

θ = α·θ₁ + (1−α)·θ* needs no training, so the best α is found by measuring several (Wortsman et
al., https://arxiv.org/abs/2109.01903).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.checks import share
from holdfast.evaluate.measure import measure_many
from holdfast.evaluate.report import ForgettingReport
from holdfast.io.heads import ModelSource
from holdfast.io.merge import merge_on_disk
from holdfast.io.models import Loader
from holdfast.report import sweep as _shown
from holdfast.report.document import Document
from holdfast.report.recommend import AlphaRecommendation, recommend_alpha
from holdfast.report.shown import Shown

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SweepPoint:
    """The model at one α, compared with the base.

    Attributes:
        alpha: the share of the tuned weights; 0 is the base and 1 the tuned model.
        report: the comparison with the base.
    """

    alpha: float
    report: ForgettingReport

    def __post_init__(self) -> None:
        share("alpha", self.alpha)


@dataclass(frozen=True)
class Sweep(Shown):
    """The models between a base and a tuned model, measured.

    Attributes:
        base, tuned: the names of the models.
        points: the measured models, by increasing α.
    """

    base: str
    tuned: str
    points: tuple[SweepPoint, ...]
    schema_version: int = 1
    what: ClassVar[str] = "sweep"

    def __post_init__(self) -> None:
        alphas = [point.alpha for point in self.points]
        if not alphas or alphas != sorted(set(alphas)):
            raise ValueError("a sweep needs at least one point, and α must increase")

    def recommendation(self) -> AlphaRecommendation:
        """Which α to take, and why, by the rule of :mod:`holdfast.report.recommend`."""
        return recommend_alpha(self)

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
    """Measure the models between a base and a tuned model.

    The base takes the tests once. At any time, at most one merged checkpoint is on disk and one
    model in memory. The base and the tuned model themselves are not copied.

    Args:
        base: a directory or a file of the pretrained model.
        tuned: a directory or a file of the tuned model, or a LoRA adapter.
        alphas: the shares of the tuned weights, from 0 to 1.
        out: where merged checkpoints are written; None uses a temporary directory.
        keep: keep the merged checkpoints, as ``out/alpha-0.25`` and so on.
        overwrite: replace existing checkpoints.
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
        raise ValueError("a sweep needs at least one α, for example 0, 0.5 and 1")
    if keep and out is None:
        raise ValueError("keep=True needs out=, the directory for the merged checkpoints")
    # The merged models come first, so that models that cannot be merged fail before any test.
    order = sorted(wanted, key=lambda alpha: (alpha in (0, 1), alpha))
    if isinstance(base, nn.Module) or isinstance(tuned, nn.Module):
        raise ValueError(
            "a sweep needs checkpoints on disk: save the model with save_pretrained, and pass its "
            "directory"
        )
    merging = {
        "overwrite": overwrite,
        "allow_pickle": loader is not None and loader.allow_pickle,
        "progress": progress,
    }
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
        models = _models(base, tuned, order, Path(out), keep, merging)
        reports = measure_many(base, models, drift=drift, loader=loader, progress=progress, **tests)
        for opened in (models, reports):  # closed in reverse order
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
    """Yield the model at each α with its name; a merged model is removed after its use."""
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
