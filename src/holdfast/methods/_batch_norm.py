"""BatchNorm's running statistics: hold them in training, or estimate those of a merged model again.

Between two models, the statistics of neither fit: Izmailov et al., *Averaging Weights Leads to
Wider Optima and Better Generalization*, UAI 2018, https://arxiv.org/abs/1803.05407, section 3.2.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from holdfast._torch.batch import batch_length, evaluating, inputs_and_labels, to_device
from holdfast._torch.layers import within
from holdfast.data import Collate, as_source
from holdfast.methods._freezing import held_in_eval, leave_eval, stay_in_eval
from holdfast.stages import Run, Trainable


@dataclass(frozen=True)
class HoldsStatistics(Trainable):
    """A method that trains the body and may hold BatchNorm's running statistics.

    Args:
        hold_statistics: normalize with the pretrained running statistics, also in training, and
            do not change them. New parts have their own. Training then needs a warm-up of the
            learning rate and clipped gradients, which hosts add if you set neither.
    """

    hold_statistics: bool = field(default=False, kw_only=True)

    @property
    def needs_warm_up(self) -> bool:
        return self.hold_statistics

    def prepare(self, run: Run) -> nn.Module:
        if self.hold_statistics:
            held = set(statistics_of(run.model))
            named = [name for name, module in run.model.named_modules() if module in held]
            stay_in_eval(run.model, [name for name in named if not within(name, run.new)])
        return run.model

    def finish(self, model: nn.Module) -> nn.Module:
        leave_eval(model)
        return model


def statistics_of(model: nn.Module) -> list[_BatchNorm]:
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    return [norm for norm in norms if norm.track_running_stats and norm.running_mean is not None]


@torch.no_grad()
def reestimate_statistics(
    model: nn.Module, data: Any, collate: Collate | None = None, *, batch_size: int = 32
) -> nn.Module:
    """Set BatchNorm's running statistics, in place, to their means over one pass of data.

    All other modules run in eval mode, and no weight changes. Statistics that are kept in eval mode
    (of a frozen body) do not change. An error leaves the model unchanged. A last batch with one
    sample is skipped, because it has no variance.

    >>> x, model = torch.tensor([[1.0], [2.0], [3.0]]), nn.Sequential(nn.BatchNorm1d(1))
    >>> reestimate_statistics(model, [(x, torch.zeros(3))])[0].running_mean
    tensor([2.])
    """
    held = held_in_eval(model)
    norms = [norm for norm in statistics_of(model) if norm not in held]
    if not norms:
        return model
    device = next(tensor for tensor in model.state_dict().values()).device
    before = [{name: b.clone() for name, b in norm.named_buffers()} for norm in norms]
    momenta = [norm.momentum for norm in norms]
    try:
        with evaluating(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # a cumulative mean
                norm.train()
            seen = 0
            for _, read in as_source(data, collate, batch_size):
                batch = to_device(read(), device)
                if batch_length(batch) > 1 or not seen:
                    _forward(model, batch)
                    seen += 1
        if not seen:
            raise ValueError("the data is empty: there are no statistics to estimate")
    except BaseException:
        for norm, buffers in zip(norms, before, strict=True):
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])
        raise
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return model


def _forward(model: nn.Module, batch: Any) -> None:
    inputs = batch if isinstance(batch, Tensor) else inputs_and_labels(model, batch)[0]
    model(**inputs) if isinstance(inputs, dict) else model(inputs)
