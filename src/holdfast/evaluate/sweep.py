"""Interpolate between a base and a tuned model at several α, and measure each model.

    found = sweep("models/base", "runs/tuned", text=["wiki.txt"], target="gsm8k.jsonl")
    found.recommendation().alpha, found.save("sweep.html")

θ = α·θ₁ + (1−α)·θ* needs no training, so the best α is found by measuring several (Wortsman et
al., https://arxiv.org/abs/2109.01903).
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.checks import share
from holdfast.evaluate.measure import Meter
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.suite import Suite
from holdfast.io.files import temporary
from holdfast.io.heads import ModelSource
from holdfast.io.merge import merge_on_disk
from holdfast.io.models import Loader
from holdfast.recipe import recipe_beside
from holdfast.report import sweep as _shown
from holdfast.report.document import Document
from holdfast.report.recommend import AlphaRecommendation, recommend_alpha
from holdfast.report.shown import Shown

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SweepPoint:
    """The model at one α, the share of the tuned weights, compared with the base."""

    alpha: float
    report: ForgettingReport

    def __post_init__(self) -> None:
        share("alpha", self.alpha)


@dataclass(frozen=True, repr=False)
class Sweep(Shown):
    """The models between a base and a tuned model, measured, by increasing α."""

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

    def rows(self) -> list[dict[str, Any]]:
        """One row per α and test."""
        return [{"alpha": p.alpha, **row} for p in self.points for row in p.report.rows()]

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
        base, tuned: directories or files of the models; ``tuned`` may be a LoRA adapter.
        alphas: the shares of the tuned weights, from 0 (the base) to 1 (the tuned model).
        out: where merged checkpoints are written. If None, a temporary directory is used.
        keep: keep the merged checkpoints, as ``out/alpha-0.25`` and so on.
        overwrite: replace existing checkpoints.
        drift, loader, progress, tests: as for :func:`holdfast.measure`.

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
            "a sweep needs checkpoints on disk: pass the directory that save_pretrained wrote"
        )
    points = []
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
        meter = Meter(base, Suite(**tests), drift, loader, progress)
        recipe = recipe_beside(tuned)
        merging = {"overwrite": overwrite, "allow_pickle": meter.loader.allow_pickle}
        for alpha in order:
            if alpha in (0, 1):
                report = meter(str(tuned), tuned) if alpha else meter(str(base), None)
            else:
                kept = Path(out, f"alpha-{alpha}")
                merged = kept if keep else temporary(kept)
                try:
                    merge_on_disk(base, tuned, merged, alpha, progress=progress, **merging)
                    report = meter(f"{tuned}, α = {alpha:g}", merged, recipe)
                finally:
                    if not keep:
                        shutil.rmtree(merged, ignore_errors=True)
            points.append(SweepPoint(alpha, report))
    return Sweep(str(base), str(tuned), tuple(sorted(points, key=lambda point: point.alpha)))
