"""Watch forgetting during training: the figures of a report at regular updates.

    watch = Watch(model, text={"wikitext": text}, every=100, loader=Loader(tokenizer=tokenizer))
    model = finetune_loop(model, recipe, data, lr=2e-5, watch=watch, log=history.append)
    report = replace(report, curves=curves_of(history))  # the report's page plots them

Every host has a callback for a watch; its figures appear in the host's log next to the loss.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from holdfast._torch.adapters import adapter_norms, adapter_parts, base_name, unwrapped
from holdfast._torch.checks import whole_number
from holdfast._torch.layers import within
from holdfast._torch.rng import preserve_rng
from holdfast.evaluate.amount import limited
from holdfast.evaluate.measure import Compared, Examination
from holdfast.evaluate.report import Curve, Score
from holdfast.evaluate.suite import Suite
from holdfast.hosts.job import Training
from holdfast.io.models import Loader
from holdfast.io.rows import Rows
from holdfast.reference import Reference, distance
from holdfast.registry import methods

#: The prefix of the figures' names in a host's log.
PREFIX = "forgetting/"
#: The tests run often during training, so they are smaller than those of ``measure``.
_SMALL = {"limit": 100, "context_free": 0, "kl_samples": 16}


class Watch:
    """The distance, the divergence and the scores of a model at regular updates of its training.

    Create it while the model holds its pretrained weights, which are the base.

    Args:
        model: the model that will be trained.
        every: updates between two measurements. The distance costs one pass over the weights; the
            tests cost as much as running the model on their data, so keep the data small.
        loader: the tokenizer and the maximum length (512 by default).
        reference: the pretrained weights. If None, they are copied from the model to the CPU.
        tests: the tests, with the names of :func:`holdfast.measure`: ``text``, ``data``, … Unlike
            there, the defaults are ``limit=100``, ``context_free=0`` and ``kl_samples=16``.

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
        loader: Loader | None = None,
        reference: Reference | None = None,
        **tests: Any,
    ) -> None:
        self.every = whole_number("every", every, 1)
        self.last: int | None = None  # an update that is measured in any case
        self.exam = Examination(Suite(**{**_SMALL, **tests}), tokens=32)
        self.reference = reference or Reference.of(model, device="cpu")
        self.loader = loader or Loader(max_length=512)
        #: The loss on the target at the last measurement, by which a run may stop early.
        self.target_loss: float | None = math.nan if self.exam.targets else None
        with self.loader.open(unwrapped(model)) as loaded:
            if self.exam.free and loaded.kind != "causal_lm":
                name = type(model).__name__
                raise ValueError(f"context_free must be 0: {name} does not generate texts")
            self.exam.start(loaded)

    def __call__(self, update: int, model: nn.Module) -> dict[str, float]:
        """Return the figures at this update, or nothing between two measurements."""
        if update % self.every and update != self.last:
            return {}
        model = unwrapped(model)
        if any(hasattr(p, "ds_id") and not p.numel() for p in model.parameters()):
            raise ValueError("a watch needs whole weights, which ZeRO-3 partitions: use ZeRO-2")
        values = {f"{PREFIX}distance": effective_distance(model, self.reference)}
        if self.exam.kls or self.exam.tests:
            answers = self.examine(model)
            if len(answers.divergences) < len(self.exam.kls):
                raise ValueError(answers.notes[-1])  # a curve must not end silently
            values |= {f"{PREFIX}kl/{d.name}": d.kl.value for d in answers.divergences}
            values |= {f"{PREFIX}{s.name}/{s.metric}": s.after.value for s in answers.scores}
            self.target_loss = _target_loss(answers.scores)
        return values

    def examine(self, model: nn.Module) -> Compared:
        """Run all tests on a model; its mode and the random state are unchanged afterwards."""
        devices = [p.device for p in list(model.parameters())[:1] if p.device.type == "cuda"]
        with preserve_rng(devices), self.loader.open(model) as loaded:
            return self.exam.compare(loaded)


def _target_loss(scores: Sequence[Score]) -> float | None:
    """The first loss on the target; without one, its first score with the sign changed."""
    targets = sorted((s for s in scores if s.role == "target"), key=lambda s: not s.lower_is_better)
    if not targets:
        return None
    return targets[0].after.value if targets[0].lower_is_better else -targets[0].after.value


def watch_training(
    model: nn.Module,
    total_updates: int,
    *,
    training: Training,
    loader: Loader,
    validation: Rows = (),
    new: Sequence[str] = (),
    retained: Suite | None = None,
) -> Watch:
    """Watch the distance to the pretrained weights, and the loss on the rows for validation.

    ``retained`` are tests of what should not be forgotten. Their limit is not that of the rows for
    validation, all of which count.
    """
    every = training.evaluate_every or max(1, total_updates // 20)
    tests = validation_tests(validation)
    if retained is not None:
        with loader.open(unwrapped(model)) as loaded:
            probes = retained.build()[0]
            tests["probes"] = [limited(probe, loaded, retained.limit, None) for probe in probes]
        tests["context_free"] = retained.context_free
    reference = Reference.of(model, device="cpu").without(new)
    watch = Watch(model, every=every, loader=loader, reference=reference, **tests)
    watch.last = total_updates
    return watch


def validation_tests(rows: Rows) -> dict[str, Any]:
    """The tests on rows for validation, as arguments of :class:`Watch`."""
    given = {"validation": rows} if len(rows) else {}
    return {"target": given, "limit": None, "kl_samples": 0, "context_free": 0}


def curves_of(history: Iterable[Mapping[str, Any]]) -> tuple[Curve, ...]:
    """Return the curves in a host's log: loss, distance, and the figures of methods and watches.

    ``history`` are rows with ``update`` or ``step`` and figures by name: those that
    ``finetune_loop`` passes to ``log=``, or a Trainer's ``state.log_history``.
    """
    found: dict[str, dict[int, float]] = {}
    plotted = {"loss", "eval_loss", "distance"}.union(*(e.cls.plotted for e in methods()))
    for row in history:
        step = row.get("update", row.get("step"))
        for name, value in row.items():
            watched = name.startswith(PREFIX) or name in plotted
            if step is not None and watched and isinstance(value, int | float):
                found.setdefault(name, {})[int(step)] = float(value)
    # The watch measures the effective weights; a host's own distance may be that of LoRA's B.
    if f"{PREFIX}distance" in found:
        found.pop("distance", None)
    return tuple(
        Curve(name.removeprefix(PREFIX), *zip(*sorted(points.items()), strict=True))
        for name, points in found.items()
    )


@torch.no_grad()
def effective_distance(model: nn.Module, reference: Reference) -> float:
    """Return ‖θ − θ*‖ of the effective weights.

    For adapters this is the norm of the change ΔW of each layer, combined with the distance of
    other trained weights.
    """
    parts, adapters = adapter_norms(model), adapter_parts(model)
    if not parts:
        return reference.total_distance(model)
    for name, p in model.named_parameters():
        anchor = reference.get(name, reference.get(base_name(name)))
        if p.requires_grad and anchor is not None and not within(name, adapters):
            parts.append(distance(p, anchor))
    return math.hypot(*parts)
