"""Watch forgetting while it happens: the figures of a report at chosen steps of a training run.

    watch = Watch(model, tokenizer=tokenizer, text={"wikitext": text}, every=100)  # first
    model = finetune_loop(model, recipe, data, lr=2e-5, watch=watch, log=history.append)
    report = replace(report, curves=curves_of(history))  # draw them

The hosts have a callback each that does the same: their logs hold the figures beside the loss.
"""

from __future__ import annotations

import math
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from holdfast._batch import unwrapped
from holdfast._checks import whole
from holdfast.forgetting.inputs import Data, PathLike, kl_of, named, probe_of, texts_from
from holdfast.forgetting.kl import KL, ContextFreeKL
from holdfast.forgetting.models import Loader
from holdfast.forgetting.probes import Probe
from holdfast.forgetting.report import Curve
from holdfast.reference import Reference

__all__ = ["Watch", "curves_of", "effective_distance"]

#: What the names of its figures begin with in a host's log.
PREFIX = "forgetting/"


class Watch:
    """The distance, the divergence and the scores of a model, at chosen steps of its training.

    Make it while the model holds its pretrained weights: they are the base.

    Args:
        model: the model that will be trained.
        every: updates between two looks. The distance costs one pass over the weights; the rest
            costs what it costs to run the model on the data, so keep that small.
        text, data, target, probes, limit, kl_samples, max_length, tokenizer: as for
            :func:`holdfast.measure`.
        context_free: how many texts the base writes for the data-free divergence; 0 for none.
        reference: the pretrained weights, if there is a copy already; else one is made on the CPU.

    Example:
        >>> model = nn.Linear(2, 2)
        >>> watch = Watch(model, every=10)
        >>> _ = model.weight.data.add_(1.0)
        >>> watch(10, model)
        {'forgetting/distance': 2.0}
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        text: PathLike | Sequence[PathLike] | Mapping[str, str] = (),
        data: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
        target: Data | Mapping[str, Data] = (),
        probes: Sequence[Probe] = (),
        context_free: int = 0,
        limit: int | None = 100,
        kl_samples: int = 16,
        max_length: int = 512,
        tokenizer: Any = None,
        reference: Reference | None = None,
    ) -> None:
        self.every = whole("every", every, 1)
        targets = [probe_of(n, d, "target", limit) for n, d in named(target, "target").items()]
        retained = [probe_of(n, d, "retained", limit) for n, d in named(data, "data").items()]
        self.probes: list[Probe] = [*texts_from(text), *retained, *targets, *probes]
        self.reference = reference or Reference.of(model, device="cpu")
        self.loader = Loader(max_length=max_length, tokenizer=tokenizer)
        self.kls: list[KL] = []
        folder = tempfile.mkdtemp(prefix="holdfast-")
        self._let_go = weakref.finalize(self, shutil.rmtree, folder, True)
        with self.loader.open(unwrapped(model)) as loaded:
            if context_free:
                self.kls.append(ContextFreeKL(context_free, tokens=32))
            for probe in targets:
                if kl_samples and (kl := kl_of(probe, loaded, kl_samples)):
                    self.kls.append(kl)
            for kl in self.kls:
                kl.remember(loaded, Path(folder), progress=False)
            self.before = [probe.run(loaded, progress=False) for probe in self.probes]

    def __call__(self, update: int, model: nn.Module) -> dict[str, float]:
        """The figures of this moment, if it is one to look at; training goes on undisturbed."""
        if update % self.every:
            return {}
        model = unwrapped(model)
        values = {f"{PREFIX}distance": effective_distance(model, self.reference)}
        if not (self.kls or self.probes):
            return values
        devices = [p.device for p in list(model.parameters())[:1] if p.device.type == "cuda"]
        with torch.random.fork_rng(devices), self.loader.open(model) as loaded:
            for kl in self.kls:
                values[f"{PREFIX}kl/{kl.name}"] = kl.compare(loaded, progress=False).kl.value
            for probe, before in zip(self.probes, self.before, strict=True):
                for score in probe.scores(before, probe.run(loaded, progress=False)):
                    values[f"{PREFIX}{score.name}/{score.metric}"] = score.after.value
        return values


def curves_of(history: Iterable[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """The curves in a host's log: of the loss, the distance, λ and what was watched.

    Args:
        history: rows with ``update`` or ``step`` and figures by name: what ``finetune_loop`` gives
            to ``log=``, or a Trainer's ``state.log_history``.
    """
    found: dict[str, dict[int, float]] = {}
    for row in history:
        step = row.get("update", row.get("step"))
        for name, value in row.items():
            watched = name.startswith(PREFIX) or name in ("loss", "eval_loss", "distance", "lam")
            if step is not None and watched and isinstance(value, int | float):
                found.setdefault(name.removeprefix(PREFIX), {})[int(step)] = float(value)
    return tuple(
        Curve(name, tuple(sorted(points)), tuple(points[step] for step in sorted(points)))
        for name, points in found.items()
    )


@torch.no_grad()
def effective_distance(model: nn.Module, reference: Reference) -> float:
    """‖θ − θ*‖ of the weights that act: of LoRA adapters, the norm of what they add to the base."""
    added = [_added_norm(module) for module in model.modules() if hasattr(module, "lora_B")]
    if any(norm is not None for norm in added):
        return math.hypot(*(norm for norm in added if norm is not None))
    return reference.distance(model).total


def _added_norm(layer: Any) -> float | None:
    """‖s·BA‖ of a LoRA layer's active adapters, without building BA."""
    products: list[tuple[float, Tensor, Tensor]] = []
    for name in layer.active_adapters:
        if name in layer.lora_A:
            a, b = layer.lora_A[name].weight, layer.lora_B[name].weight
            products.append((layer.scaling[name], a.flatten(1).double(), b.flatten(1).double()))
    if not products:
        return None
    if len(products) > 1:
        return float(torch.linalg.vector_norm(sum(s * b @ a for s, a, b in products)))
    scale, a, b = products[0]
    return abs(scale) * math.sqrt(max(0.0, float(((b.T @ b) * (a @ a.T)).sum())))
