"""Mixout: in each forward pass, set a random share of the weights to the pretrained ones.

Lee, Cho and Kang, *Mixout: Effective Regularization to Finetune Large-scale Pretrained Language
Models*, ICLR 2020, https://arxiv.org/abs/1909.11299. With m ~ Bernoulli(p) for each input neuron of
a linear layer, equal for all its outgoing weights, the weights in training are

    θ̃ = (m·θ* + (1 − m)·θ − p·θ*) / (1 − p) = θ* + (1 − m)·(θ − θ*) / (1 − p)

so that E θ̃ = θ. Mixout applies dropout to θ − θ*. For θ* = 0, it is ordinary dropout. On average it
penalizes the distance to θ*: the expected value of a quadratic loss with curvature μ increases
by ½·μ·p/(1 − p)·‖θ − θ*‖².
"""

from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Literal, cast, get_args

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.checks import one_of, share
from holdfast.stages import Checks, MedianLoss, Run, SearchRange, SearchSpace, Trainable

Per = Literal["neuron", "weight"]


@dataclass(frozen=True)
class Mixout(Trainable):
    """In each forward pass, mix the weights of every linear layer with the pretrained ones.

    Biases, embeddings, norms, convolutions and new parts are not mixed. In eval mode the layers do
    not mix. The masks come from torch's global generator, as in dropout. The model's own dropout is
    not changed. The paper disables it; to do so, set the dropout to 0 in the model's configuration.

    Args:
        p: the probability of the pretrained weight, in [0, 1). The paper recommends 0.7 to 0.9;
            0 is full fine-tuning.
        per: draw m per input ``"neuron"``, as in the paper's released code, or per ``"weight"``
            (the paper's *mixconnect*).

    Example:
        >>> from holdfast import Mixout, Recipe
        >>> Recipe(trainable=Mixout(p=0.9)).name
        'mixout'
    """

    checks: ClassVar[Checks] = {"p": share, "per": partial(one_of, allowed=get_args(Per))}
    neutral: ClassVar[dict[str, Any] | None] = {"p": 0.0}
    needs_reference: ClassVar[bool] = True

    p: float = 0.7
    per: Per = "neuron"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.p == 1:
            raise ValueError("p must be below 1: at 1 no tuned weight is used")

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"p": SearchRange(0.1, 0.95, 0.7, log=False)}

    def prepare(self, run: Run) -> nn.Module:
        """Make every linear layer with pretrained weights mix. Parameters keep their names."""
        model = run.model
        if self.p == 0:
            return model
        if run.reference is None:
            raise ValueError("Mixout needs the pretrained weights: pass reference= to the run")
        names, params = zip(*model.named_parameters(), strict=True)
        anchors = run.reference.match(params, names)
        known = {id(p): a for p, a in zip(params, anchors, strict=True) if a is not None}
        layers = [
            (module, mixing, known[id(module.weight)])
            for module in model.modules()
            if (mixing := _mixing_class(module)) and id(module.weight) in known
        ]
        if not layers:
            raise ValueError(
                f"{type(model).__name__} has no linear layer (nn.Linear) with pretrained weights, "
                "which Mixout needs"
            )
        for module, mixing, anchor in layers:
            module.__class__ = mixing
            module.p, module.per, module.anchor = self.p, self.per, anchor  # type: ignore[assignment]
        return model

    def finish(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if isinstance(module, _Mixing):
                module.__class__ = module.plain  # type: ignore[assignment]
                del module.p, module.per, module.anchor
        return model


def mixout(weight: Tensor, anchor: Tensor, p: float, per: Per = "neuron") -> Tensor:
    """θ̃ = θ* + (1 − m)·(θ − θ*)/(1 − p) for θ of shape (outputs, inputs); m = 1 has probability p.

    Example:
        >>> import torch
        >>> mixed = mixout(torch.full((4, 1000), 2.0), torch.ones(4, 1000), p=0.5)
        >>> sorted(mixed.unique().tolist())             # θ* = 1, or θ* + (θ − θ*)/(1 − p) = 3
        [1.0, 3.0]
    """
    difference = weight - anchor
    if per == "neuron":
        return anchor + difference * F.dropout(difference.new_ones(difference.shape[1]), p)
    return anchor + F.dropout(difference, p)


class _Mixing(nn.Module):
    """Base class of mixing layers. ``anchor`` is not a buffer, so it is not in the state dict."""

    plain: ClassVar[type[nn.Module]]
    draws_in_training: ClassVar[bool] = True
    inputs_first: ClassVar[bool] = False  # whether the weight is (inputs, outputs)
    p: float
    per: Per
    anchor: Tensor
    weight: Tensor
    bias: Any

    def forward(self, x: Tensor) -> Tensor:
        """The plain layer, with mixed weights in training."""
        if not self.training:
            return cast(Tensor, super().forward(x))
        self.anchor = self.anchor.to(self.weight)
        weight, anchor = self.weight, self.anchor
        if self.inputs_first:
            weight, anchor = weight.T, anchor.T
        return F.linear(x, mixout(weight, anchor, self.p, self.per), self.bias)


class MixLinear(_Mixing, nn.Linear):
    """A mixing linear layer. :class:`Mixout` converts ``nn.Linear`` layers into it, and back."""

    plain = nn.Linear


def _mixing_class(module: nn.Module) -> type[_Mixing] | None:
    """The mixing class for a layer; None if it is not a linear layer.

    Subclasses of ``nn.Linear`` are excluded: they have their own forward, or are never called, such
    as the output projection in ``nn.MultiheadAttention``.
    """
    kind = type(module)
    if kind is nn.Linear:
        return MixLinear
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        return _mix_conv1d()
    return None


@cache
def _mix_conv1d() -> type[_Mixing]:
    """``MixConv1D``, created on first use because its base class is in transformers."""
    from transformers.pytorch_utils import Conv1D

    class MixConv1D(_Mixing, Conv1D):  # type: ignore[misc]
        """A mixing linear layer of GPT-2."""

        plain = Conv1D
        inputs_first = True

    MixConv1D.__qualname__ = "MixConv1D"
    return MixConv1D


def __getattr__(name: str) -> Any:
    """Find ``MixConv1D`` for pickle, which looks up classes by name."""
    if name == "MixConv1D":
        return _mix_conv1d()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
