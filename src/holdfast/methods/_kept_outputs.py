"""Keep some outputs of the model near the pretrained model's, in a second pass per batch."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import unwrapped
from holdfast._torch.batch import evaluating, pad_id_of
from holdfast.losses import Task, count_targets
from holdfast.methods._base_model import Outputs, base_model_cost, base_model_of
from holdfast.methods._varied import Inputs, varied
from holdfast.stages import Cost, Planned, RecallTerm, Run

Distance = Callable[[Tensor, Tensor], Tensor]  # z*, z → one value per sample


def kept_outputs_cost(planned: Planned) -> Cost:
    """The model and the pretrained model run on a second batch per update."""
    return replace(base_model_cost(planned), trained=planned.samples * planned.length)


class KeptOutputs(RecallTerm):
    """strength · the mean distance of outputs z from z*, each sample counted with its targets.

    Both are computed in eval mode: without dropout, and with the running statistics of BatchNorm,
    which do not change.

    Args:
        outputs: computes z of a model, one row per sample.
        distance: z* and z → one value per sample.
        inputs: whether to compare on the target's inputs, or on inputs derived from them.
    """

    uses_outputs = True

    def __init__(
        self, run: Run, outputs: Outputs, distance: Distance, strength: float, inputs: Inputs
    ) -> None:
        self.outputs, self.distance = outputs, distance
        self.strength, self.inputs = strength, inputs
        self.base = base_model_of(run, outputs)
        self.task = cast(Task, run.task)
        self.seed, self.pad_id = run.seed, pad_id_of(run.model)

    def before(
        self, model: nn.Module, inputs: Any, labels: Tensor, values: Mapping[str, Tensor],
        update: int,
    ) -> tuple[nn.Module, Any, Tensor]:  # fmt: skip
        if self.inputs == "varied":
            inputs = varied(inputs, self.seed, update, self.pad_id)
        with torch.no_grad():
            return model, inputs, self.base(model, inputs)

    def after(self, before: tuple[nn.Module, Any, Tensor], labels: Tensor) -> Tensor:
        # After the target's pass: in training mode, it changes the statistics that this one uses.
        model, inputs, base = before
        inner = unwrapped(model)  # DDP's hooks are those of the parameters
        with evaluating(inner):
            z = self.outputs(inner, inputs)
        z = (z if z.dtype == torch.float64 else z.float()).reshape(len(z), -1)
        apart = self.distance(base.to(z).reshape(z.shape), z)
        return self.strength * (count_targets(labels, self.task) * apart).sum()
