"""WiSE-FT: keep a point between the pretrained and the tuned weights.

Wortsman et al., *Robust fine-tuning of zero-shot models*, CVPR 2022,
https://arxiv.org/abs/2109.01903.

    θ = α·θ₁ + (1−α)·θ*

α = 1 is the tuned model, α = 0 the pretrained one, to the last bit. What has no pretrained
counterpart (a new head) stays as tuned. It costs no training: sweep α and choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from holdfast._checks import at_least_zero
from holdfast.reference import Reference

__all__ = ["WiseFT"]

Result = TypeVar("Result")
Statistics = Literal["interpolate", "keep"]


@dataclass(frozen=True)
class WiseFT:
    """Interpolate the weights of a tuned model with the pretrained ones.

    Args:
        alpha: the share of the tuned weights, between 0 and 1.
        statistics: what to do with BatchNorm's running statistics and other floating-point
            buffers: ``"interpolate"`` them as well, or ``"keep"`` the tuned ones (and re-estimate
            them with a pass over data). Integer buffers are kept as tuned.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(2, 1)
        >>> pretrained = holdfast.Reference.of(model)
        >>> _ = model.weight.data.add_(1.0)                     # fine-tuning
        >>> _ = holdfast.WiseFT(alpha=0.5).merge(model, pretrained)
        >>> round(pretrained.distance(model).total, 4)          # half of √2
        0.7071
    """

    alpha: float = 0.5
    statistics: Statistics = "interpolate"

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", _share(self.alpha))
        if self.statistics not in get_args(Statistics):
            raise ValueError(f"statistics must be 'interpolate' or 'keep', got {self.statistics!r}")

    @torch.no_grad()
    def merge(self, model: nn.Module, reference: Reference | None) -> nn.Module:
        """Move a tuned model, in place, to its place between the two.

        Args:
            model: the tuned model. One with LoRA adapters is interpolated through its effective
                weights: θ* + α·BA, by scaling B.
            reference: the pretrained weights; None if only LoRA adapters were trained.
        """
        for tensor, base in self._pairs(model, reference):
            tensor.copy_(torch.lerp(base.to(tensor), tensor, self.alpha))
        return model

    def sweep(
        self,
        model: nn.Module,
        reference: Reference | None,
        alphas: Sequence[float],
        evaluate: Callable[[nn.Module], Result],
    ) -> dict[float, Result]:
        """Evaluate the model at several α; afterwards it is as tuned again.

        Args:
            model, reference: as in :meth:`merge`; this object's own alpha is not used.
            alphas: the points to look at.
            evaluate: called with the model at each point.

        Returns:
            α → what ``evaluate`` returned.
        """
        for alpha in alphas:
            _share(alpha)
        pairs = list(self._pairs(model, reference))
        tuned = [tensor.detach().clone() for tensor, _ in pairs]
        results: dict[float, Result] = {}
        try:
            for alpha in alphas:
                with torch.no_grad():
                    for (tensor, base), end in zip(pairs, tuned, strict=True):
                        tensor.copy_(torch.lerp(base.to(tensor), end, float(alpha)))
                results[alpha] = evaluate(model)
        finally:
            with torch.no_grad():
                for (tensor, _), end in zip(pairs, tuned, strict=True):
                    tensor.copy_(end)
        return results

    def _pairs(
        self, model: nn.Module, reference: Reference | None
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """What is interpolated: each tensor of the model, and where it is at α = 0."""
        adapters = dict(_lora_b(model))
        zero = torch.zeros(())
        yield from ((b, zero.expand_as(b)) for b in adapters.values())
        if reference is None:
            if not adapters:
                raise ValueError("WiSE-FT needs the pretrained weights: pass the Reference")
            return
        named: list[tuple[str, Tensor]] = [
            (n, p) for n, p in model.named_parameters() if n not in adapters
        ]
        if self.statistics == "interpolate":
            named += [(n, b) for n, b in model.named_buffers() if b.is_floating_point()]
        names, tensors = [n for n, _ in named], [t for _, t in named]
        bases = reference.match(tensors, names)
        if all(base is None for base in bases):
            raise ValueError(reference.nothing_matches(names))
        yield from (
            (tensor, base) for tensor, base in zip(tensors, bases, strict=True) if base is not None
        )


def _lora_b(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The B of every LoRA pair that PEFT has put into a model: 0 there is the pretrained weight."""
    for name, module in model.named_modules():
        layers: Any = getattr(module, "lora_B", None)
        if not isinstance(layers, nn.ModuleDict):
            continue
        if any(getattr(module, "use_dora", {}).values()):
            raise ValueError(
                f"{name} uses DoRA, whose weights are not linear in B: merge the adapters into the "
                "model first (merge_and_unload), then interpolate with a Reference"
            )
        for adapter, layer in layers.items():
            for kind, p in layer.named_parameters():
                yield f"{name}.lora_B.{adapter}.{kind}", p


def _share(alpha: float) -> float:
    if at_least_zero("alpha", alpha) > 1:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha!r}")
    return float(alpha)
