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
from torch import nn

from holdfast._torch.adapters import adapter_norms, base_name, unwrapped
from holdfast._torch.checks import whole as whole_number
from holdfast._torch.rng import preserve_rng
from holdfast.evaluate.inputs import Data, PathLike, kl_of, named, probe_of, texts_from
from holdfast.evaluate.kl import KL, ContextFreeKL
from holdfast.evaluate.probes import Probe
from holdfast.evaluate.report import Curve
from holdfast.io.models import Loader
from holdfast.reference import Reference, distance

__all__ = ["Watch", "curves_of", "effective_distance", "watch_distance"]

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
        >>> _ = model.weight.data.zero_()
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
        self.every = whole_number("every", every, 1)
        targets = [probe_of(n, d, "target", limit) for n, d in named(target, "target").items()]
        retained = [probe_of(n, d, "retained", limit) for n, d in named(data, "data").items()]
        self.probes: list[Probe] = [*texts_from(text), *retained, *targets, *probes]
        self.reference = reference or Reference.of(model, device="cpu")
        self.loader = Loader(max_length=max_length, tokenizer=tokenizer)
        self.kls: list[KL] = []
        folder = tempfile.mkdtemp(prefix="holdfast-")
        self._let_go = weakref.finalize(self, shutil.rmtree, folder, True)
        with self.loader.open(unwrapped(model)) as loaded:
            if context_free and loaded.kind != "causal_lm":
                raise ValueError(f"{type(model).__name__} does not write texts: context_free=0")
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
        if any(hasattr(p, "ds_id") and not p.numel() for p in model.parameters()):
            raise ValueError("under ZeRO-3 no rank has the weights to look at: watch with ZeRO-2")
        values = {f"{PREFIX}distance": effective_distance(model, self.reference)}
        if not (self.kls or self.probes):
            return values
        devices = [p.device for p in list(model.parameters())[:1] if p.device.type == "cuda"]
        with preserve_rng(devices), self.loader.open(model) as loaded:
            for kl in self.kls:
                values[f"{PREFIX}kl/{kl.name}"] = kl.compare(loaded, progress=False).kl.value
            for probe, before in zip(self.probes, self.before, strict=True):
                for score in probe.scores(before, probe.run(loaded, progress=False)):
                    values[f"{PREFIX}{score.name}/{score.metric}"] = score.after.value
        return values


def watch_distance(model: nn.Module, total_updates: int) -> Watch:
    """Watch only the distance to the pretrained weights, about twenty times per run."""
    return Watch(model, every=max(1, total_updates // 20))


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
                found.setdefault(name, {})[int(step)] = float(value)
    if f"{PREFIX}distance" in found:  # of the weights that act; a host's own may be LoRA's B
        found.pop("distance", None)
    return tuple(
        Curve(name.removeprefix(PREFIX), *zip(*sorted(points.items()), strict=True))
        for name, points in found.items()
    )


@torch.no_grad()
def effective_distance(model: nn.Module, reference: Reference) -> float:
    """‖θ − θ*‖ of the weights that act.

    Of LoRA adapters it is the norm of what they add to the base, with the distance of what else is
    trained beside them. NaN with DoRA, whose weights are not the base's plus something.
    """
    parts = adapter_norms(model)
    if not parts:
        return reference.total_distance(model)
    for name, p in model.named_parameters():
        anchor = reference.get(name, reference.get(base_name(name)))
        if p.requires_grad and ".lora_" not in name and anchor is not None:
            parts.append(distance(p, anchor))
    return math.hypot(*parts)
