"""What every run of a plan would fail of, found before the first one begins."""

from __future__ import annotations

import difflib
import logging
from pathlib import Path
from types import SimpleNamespace

from holdfast.comparison.halves import inputs_of
from holdfast.comparison.plan import Measuring, Plan
from holdfast.evaluate.classify import Classification
from holdfast.evaluate.inputs import probe_of, similarity_of, texts_from
from holdfast.evaluate.probes import Probe
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
    inputs, limit = inputs_of(plan), plan.measuring.limit
    texts_from(inputs["text"])
    probes = [probe_of(name, data, "retained", limit) for name, data in inputs["data"].items()]
    for name, data in inputs["similarity"].items():
        similarity_of(name, data, limit)
    probes += [probe_of(name, data, "target", limit) for name, data in inputs["target"].items()]
    if task.head is not None:
        for probe in probes:
            _check_labels(task.head, probe)
    if plan.measuring.tasks:
        _check_tasks(plan.measuring)


def _check_labels(head: NewHead, probe: Probe) -> None:
    """Refuse a label that a new head will not know; no image is decoded for it."""
    if isinstance(probe, Classification):
        config = SimpleNamespace(**head.settings())
        for label in labels_of(probe.data, probe.name) or ():
            target_of(config, label, probe.name)


def _check_tasks(measuring: Measuring) -> None:
    """Refuse the name of a task that lm-evaluation-harness does not have."""
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise ImportError(
            'tasks are run by lm-evaluation-harness: pip install "holdfast[eval]"'
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    known = set(TaskManager(include_path=measuring.include_path).all_tasks)
    for task in measuring.tasks:
        if task not in known:
            near = difflib.get_close_matches(task, sorted(known), n=3)
            hint = f"; did you mean {' or '.join(near)}?" if near else ""
            raise ValueError(f"lm-evaluation-harness has no task {task!r}{hint}")
