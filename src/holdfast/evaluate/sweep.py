"""Merge tuned models with their base at several settings of a method, and measure each model.

    method = WiseFT()
    found = sweep("models/base", "runs/tuned", method, [0, 0.5, 1], target="gsm8k.jsonl")
    found.recommendation().settings, found.save("sweep.html")

A merge needs no training, so the best settings are found by measuring several.
"""

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from torch import nn

from holdfast._torch.checks import at_least_zero, did_you_mean, positive_share
from holdfast._torch.merging import Where
from holdfast.evaluate.measure import Meter
from holdfast.evaluate.report import ForgettingReport
from holdfast.evaluate.suite import Suite
from holdfast.io.files import temporary
from holdfast.io.heads import ModelSource
from holdfast.io.merge import check_number, merge_on_disk
from holdfast.io.models import Loader
from holdfast.recipe import recipe_beside
from holdfast.registry import methods
from holdfast.report import LEARN_AT_LEAST
from holdfast.report import sweep as _shown
from holdfast.report.command import command
from holdfast.report.document import Document
from holdfast.report.recommend import Recommendation, recommend_point
from holdfast.report.shown import Shown
from holdfast.report.words import settings_text
from holdfast.stages import Merging

Kind = Literal["base", "tuned", "merged"]


@dataclass(frozen=True)
class SweepPoint:
    """The model at some settings of the method, compared with the base.

    ``kind`` tells whether it is the base or the tuned model itself.
    """

    settings: dict[str, float]
    report: ForgettingReport
    kind: Kind = "merged"


@dataclass(frozen=True, repr=False)
class Sweep(Shown):
    """Merged models at several settings, measured, in the order of the settings.

    ``retain``, ``max_kl`` and ``learn_at_least`` are those of the recommendation, as for
    :func:`sweep`; ``fixed`` are other settings of the method that are not its defaults; ``models``
    are the paths of the tuned models.
    """

    base: str
    tuned: str
    points: tuple[SweepPoint, ...]
    method: str = ""
    retain: float | None = None
    max_kl: float | None = None
    learn_at_least: float = LEARN_AT_LEAST
    fixed: dict[str, float] = field(default_factory=dict)
    models: tuple[str, ...] = ()
    schema_version: int = 2
    what: ClassVar[str] = "sweep"

    def __post_init__(self) -> None:
        positive_share("learn_at_least", self.learn_at_least)
        names = {tuple(point.settings) for point in self.points}
        values = [tuple(point.settings.values()) for point in self.points]
        if len(names) != 1 or () in names or values != sorted(set(values)):
            raise ValueError(
                "a sweep needs at least one point, all with the same settings, which must increase"
            )

    def recommendation(self, learn_at_least: float | None = None) -> Recommendation:
        """The settings to take, and why; ``learn_at_least`` replaces that of the sweep."""
        return recommend_point(self, learn_at_least)

    def command(self, point: SweepPoint) -> str:
        """The command line that writes the merged model; empty if the model is not merged."""
        settings, out = {**self.fixed, **point.settings}, f"merged-{folder_of(point.settings)}"
        for entry in methods("merging") if self.models and point.kind == "merged" else ():
            known = {f.name for f in fields(entry.cls)}  # a file of others may have other names
            if entry.cls.__name__ == self.method and settings.keys() <= known:
                given = {"method": entry.name, **settings, "out": out}
                return command("merge", self.base, *self.models, **given)
        return ""

    def rows(self) -> list[dict[str, Any]]:
        """One row per point and test."""
        return [{**p.settings, **row} for p in self.points for row in p.report.rows()]

    def document(self) -> Document:
        """Recommended settings, frontier and table, in the form that all renderers show."""
        return _shown.document(self)


def sweep(
    base: ModelSource,
    tuned: ModelSource | Sequence[ModelSource],
    method: Merging,
    values: Sequence[float] | Mapping[str, Sequence[float]],
    *,
    out: str | os.PathLike[str] | None = None,
    keep_models: bool = False,
    overwrite: bool = False,
    retain: float | None = None,
    max_kl: float | None = None,
    learn_at_least: float = LEARN_AT_LEAST,
    drift: bool = True,
    loader: Loader | None = None,
    progress: bool = True,
    **tests: Any,
) -> Sweep:
    """Measure the models that a method makes of a base and tuned models, at several settings.

    The base takes the tests once. At any time, at most one merged checkpoint is on disk and one
    model in memory. The base and the tuned model themselves are not copied.

    Args:
        base: a directory or a file of the pretrained model.
        tuned: the same of the tuned model, which may be an adapter; a list if the method merges
            several models.
        method: any method of stage 4 with a setting.
        values: the values of the setting that the method sweeps (α of WiSE-FT), or values by the
            name of a setting: all combinations are measured.
        out: where merged checkpoints are written. If None, a temporary directory is used.
        keep_models: keep the merged checkpoints, as ``out/alpha-0.25`` and so on.
        overwrite: replace existing checkpoints.
        retain: recommend only a model that keeps this share of every retained score of the base,
            such as 0.99.
        max_kl: recommend only a model whose context-free divergence is at most this, in nats per
            token.
        learn_at_least: share of the best gain on the target that a recommended model has at least.
        drift, loader, progress, tests: as for :func:`holdfast.measure`.

    Example:
        >>> import torch, holdfast
        >>> from safetensors.torch import save_file
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     base, tuned = f"{folder}/base.safetensors", f"{folder}/tuned.safetensors"
        ...     save_file({"w": torch.zeros(4)}, base)
        ...     save_file({"w": torch.ones(4)}, tuned)
        ...     found = sweep(base, tuned, holdfast.WiseFT(), [0, 0.5, 1], progress=False)
        >>> [point.report.drift.total.distance for point in found.points]
        [0.0, 1.0, 2.0]
    """
    retain = None if retain is None else positive_share("retain", retain)
    max_kl = None if max_kl is None else at_least_zero("max_kl", max_kl)
    positive_share("learn_at_least", learn_at_least)
    merges = _merges(method, values)
    if keep_models and out is None:
        raise ValueError("keep_models=True needs out=, the directory for the merged checkpoints")
    several = isinstance(tuned, Sequence) and not isinstance(tuned, str)
    models: list[Any] = list(tuned) if several else [tuned]  # type: ignore[arg-type]
    check_number(method, len(models))
    if any(isinstance(model, nn.Module) for model in (base, *models)):
        raise ValueError(
            "a sweep needs checkpoints on disk: pass the directory that save_pretrained wrote"
        )
    name = ", ".join(map(str, models))
    points = []
    with contextlib.ExitStack() as stack:
        if out is None:
            out = stack.enter_context(tempfile.TemporaryDirectory(prefix="holdfast-"))
        meter = Meter(base, Suite(**tests), drift, loader, progress)
        recipe = recipe_beside(models[0])
        merging = {"overwrite": overwrite, "allow_pickle": meter.loader.allow_pickle}
        # The merged models come first, so that models that cannot be merged fail before any test.
        found = [(settings, one, _kind(one, len(models))) for settings, one in merges]
        for settings, one, kind in sorted(found, key=lambda row: row[2] != "merged"):
            if kind == "merged":
                kept = Path(out, folder_of(settings))
                merged = kept if keep_models else temporary(kept)
                try:
                    merge_on_disk(base, models, merged, one, progress=progress, **merging)
                    report = meter(f"{name}, {settings_text(settings)}", merged, recipe)
                finally:
                    if not keep_models:
                        shutil.rmtree(merged, ignore_errors=True)
            else:
                report = meter(name, models[0]) if kind == "tuned" else meter(str(base), None)
            report.settings.pop("command", None)  # it names models that will be gone
            points.append(SweepPoint(settings, report, kind))
    ordered = sorted(points, key=lambda point: tuple(point.settings.values()))
    others = (f for f in fields(method) if f.name not in ordered[0].settings)
    fixed = {f.name: value for f in others if (value := getattr(method, f.name)) != f.default}
    return Sweep(
        str(base), name, tuple(ordered), type(method).__name__, retain, max_kl, learn_at_least,
        fixed={name: value for name, value in fixed.items() if type(value) in (int, float)},
        models=tuple(map(str, models)),
    )  # fmt: skip


def folder_of(settings: Mapping[str, float]) -> str:
    """The name of the merged checkpoint at some settings.

    >>> folder_of({"alpha": 0.2, "beta": 0.8})
    'alpha-0.2-beta-0.8'
    """
    return "-".join(f"{name}-{value}" for name, value in settings.items())


def _merges(
    method: Merging, values: Sequence[float] | Mapping[str, Sequence[float]]
) -> list[tuple[dict[str, float], Merging]]:
    """The method at all combinations of values, which it checks, in their order."""
    if not isinstance(values, Mapping):
        if method.swept is None:
            raise ValueError(f"{type(method).__name__} has no setting to sweep")
        values = {method.swept: values}
    known = [f.name for f in fields(method) if isinstance(getattr(method, f.name), float)]
    for name, given in values.items():
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{type(method).__name__} has no setting {name!r}{hint}")
        if not given:
            raise ValueError(f"a sweep needs at least one value of {name}, for example 0.5 and 1")
    grid = itertools.product(*({*map(float, given)} for given in values.values()))
    found = [dict(zip(values, row, strict=True)) for row in sorted(grid)]
    return [(settings, replace(method, **settings)) for settings in found]


def _kind(method: Merging, models: int) -> Kind:
    """Whether the merged model is the base or the tuned model itself."""
    neutral = method.neutral or {"": None}
    if models == 1 and all(getattr(method, k, ...) == v for k, v in neutral.items()):
        return "tuned"
    scales = {method.scale(Where("", depth)) for depth in (None, 0.0, 1.0)}
    return "base" if scales == {0} else "merged"
