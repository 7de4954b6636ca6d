"""What every run of a plan would fail of, found before the first one begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from holdfast.comparison.halves import inputs_of
from holdfast.comparison.plan import Plan
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.probes import Probe
from holdfast.evaluate.suite import Suite
from holdfast.io.checkpoint import open_weights
from holdfast.io.heads import NewHead
from holdfast.io.kinds import config_of
from holdfast.io.labels import target_of
from holdfast.io.models import Loader
from holdfast.io.rows import labels_of
from holdfast.io.training_data import TrainingData

__all__ = ["check_inputs"]


def check_inputs(plan: Plan) -> None:
    """Read the data and look at the model, whose weights are not loaded.

    Raises ValueError or OSError, with the sentence that a run would have ended with.
    """
    if (Path(plan.model) / "adapter_config.json").is_file():
        raise ValueError(
            f"{plan.model} is an adapter, and what is tuned is a full model: merge it first, with "
            f"holdfast merge BASE {plan.model} --alpha 1 --out DIR"
        )
    loader = Loader(max_length=plan.training.max_length)
    task = TrainingData.open(plan.model, plan.data, loader, head=plan.head, new=plan.new)
    where, options = loader.location(plan.model)
    config_of(where, options.get("gguf_file"))
    if Path(where).is_dir():
        open_weights(plan.model)
    asked = plan.measuring
    probes, _ = Suite(
        **inputs_of(plan), tasks=asked.tasks, include_path=asked.include_path, limit=asked.limit
    ).build()
    for probe in probes:
        if isinstance(probe, Harness):
            probe.check_tasks()
        elif task.head is not None:
            _check_labels(task.head, probe)


def _check_labels(head: NewHead, probe: Probe) -> None:
    """Refuse a label that a new head will not know; no image is decoded for it."""
    if isinstance(probe, Classification):
        config = SimpleNamespace(**head.settings())
        for label in labels_of(probe.data, probe.name) or ():
            target_of(config, label, probe.name)
