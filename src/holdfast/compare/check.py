"""What every run of a plan would fail of, found before the first one begins."""

from __future__ import annotations

from pathlib import Path

from holdfast.compare.halves import inputs_of
from holdfast.compare.plan import Plan
from holdfast.compare.task import Task
from holdfast.forgetting.inputs import probe_of, similarity_of, texts_from
from holdfast.forgetting.kinds import config_of
from holdfast.forgetting.models import Loader
from holdfast.weights.checkpoint import open_weights

__all__ = ["check_inputs"]


def check_inputs(plan: Plan) -> None:
    """Read the data and look at the model, whose weights are not loaded.

    Raises ValueError or OSError, with the sentence that a run would have ended with.
    """
    loader = Loader(max_length=plan.training.max_length)
    Task.open(plan.model, plan.data, loader, head=plan.head, new=plan.new)
    if not (Path(plan.model) / "adapter_config.json").is_file():
        where, options = loader.place(plan.model)
        config_of(where, options.get("gguf_file"))
        if Path(where).is_dir():
            open_weights(plan.model)
    inputs, limit = inputs_of(plan), plan.measuring.limit
    texts_from(inputs["text"])
    for name, data in inputs["data"].items():
        probe_of(name, data, "retained", limit)
    for name, data in inputs["similarity"].items():
        similarity_of(name, data, limit)
    for name, data in inputs["target"].items():
        probe_of(name, data, "target", limit)
