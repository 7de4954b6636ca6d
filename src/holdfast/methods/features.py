"""Features: what the head reads stays near the pretrained model's.

Mukhoti et al., *Fine-tuning can cripple your foundation model; preserving features may be the
solution* (LDIFS), https://arxiv.org/abs/2308.13320.

With z the pooled features of the model, z* those of the pretrained model on the same inputs:

    Loss_T + strength · mean over samples of |z − z*|² / |z*|²

The paper adds the distances of the features of several layers on the target's inputs. Here z are
the features of the last layer, pooled into one vector per sample, the distance is relative to the
size of z*, and the inputs are derived from the target's. On them the features can stay where they
are while the model learns the new task.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from holdfast._torch.adapters import base_name, without_peft
from holdfast._torch.batch import logits_of
from holdfast._torch.checks import at_least_zero, one_of
from holdfast._torch.layers import head_of, within
from holdfast.methods._kept_outputs import KeptOutputs
from holdfast.methods._varied import Inputs
from holdfast.stages import Checks, MedianLoss, Recall, RecallTerm, Run, SearchRange, SearchSpace


@dataclass(frozen=True)
class Features(Recall):
    """The task's loss plus the relative distance of pooled features from the pretrained model's.

    The features of a transformer for texts are the mean of its last hidden states. Those of any
    other model are the input of its head, averaged over positions. z* comes from the same model
    with its adapters off (:class:`~holdfast.LoRA`), or from a frozen copy of the model.

    Args:
        strength: the weight of the distance; 0 turns it off.
        inputs: ``"varied"`` compares features of inputs that are derived from each batch of the
            target: random contiguous pieces of token sequences, and images that are cropped,
            rotated and mixed, with other colors. ``"target"`` compares them on the batch itself.

    Example:
        >>> from holdfast import Features, Recipe
        >>> Recipe(recall=Features(strength=1.0)).name
        'features'
    """

    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}
    checks: ClassVar[Checks] = {
        "strength": at_least_zero,
        "inputs": partial(one_of, allowed=get_args(Inputs)),
    }
    uses_base: ClassVar[bool] = True

    strength: float = 0.3
    inputs: Inputs = "varied"

    @property
    def reads_data(self) -> bool:
        """False: it uses the batches only."""
        return False

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.03, 3.0, 0.3)}

    def prepare(self, run: Run) -> RecallTerm:
        if self.strength == 0:
            return RecallTerm()
        if not isinstance(run.task, str):
            raise ValueError(
                "Features needs batches of inputs and labels, which a loss function hides: pass "
                "the name of a task as task=, or use another recall"
            )
        pooled = PooledFeatures.of(run.model, run.new)
        return KeptOutputs(run, pooled, relative_distance, self.strength, self.inputs)


def relative_distance(base: Tensor, features: Tensor) -> Tensor:
    """|z − z*|² / |z*|² per row; 0 if z* is 0.

    Example:
        >>> z = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> relative_distance(z, 2 * z)
        tensor([1., 1.])
    """
    size = base.square().sum(1)
    return (features - base).square().sum(1) / size.masked_fill(size == 0, torch.inf)


class PooledFeatures:
    """The features of a model, one row per sample: its last hidden states or the head's input.

    Args:
        heads: the names of the heads. Empty for a transformer for texts.
    """

    def __init__(self, heads: Sequence[str] = ()) -> None:
        self.heads = tuple(heads)

    @classmethod
    def of(cls, model: nn.Module, new: Sequence[str]) -> PooledFeatures:
        """The features of a model whose head is the new part, or is found by its structure."""
        inner = without_peft(model)
        if text_encoder(inner) is not None:
            return cls()
        found = None if new else head_of(inner)
        if heads := (*map(base_name, new), *(() if found is None else (found,))):
            return cls(heads)
        children = ", ".join(name for name, _ in inner.named_children())
        raise ValueError(
            f"the head of {type(inner).__name__} is not known, so its features are not either: "
            f"name the part that computes the outputs in new=, one of {children}"
        )

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        """Run a model and return its features."""
        caught: list[Tensor] = []
        hooks = self._catch(without_peft(model), caught)
        try:
            logits_of(model, inputs, features=True)
        finally:
            for hook in hooks:
                hook.remove()
        if not caught:
            raise ValueError(
                f"{type(without_peft(model)).__name__} has no features: it returns no last hidden "
                f"state, or did not run its head {', '.join(self.heads)}. Name the part that "
                "computes the outputs in new="
            )
        mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
        return _pooled(caught[0], mask)

    def _catch(self, model: nn.Module, caught: list[Tensor]) -> list[RemovableHandle]:
        """Hooks that append the features."""

        def read(_: nn.Module, args: tuple[Any, ...]) -> None:
            caught.extend(x for x in args[:1] if isinstance(x, Tensor) and x.is_floating_point())

        def returned(_: nn.Module, args: Any, output: Any) -> None:
            state = getattr(output, "last_hidden_state", None)
            state = output[0] if state is None and isinstance(output, tuple) else state
            caught.extend([state] if isinstance(state, Tensor) else [])

        if not self.heads:
            encoder = cast(nn.Module, text_encoder(model))
            return [encoder.register_forward_hook(returned)]
        # The first layer with parameters that runs: a head may start with dropout or pooling.
        return [
            module.register_forward_pre_hook(read)
            for name, module in model.named_modules()
            if within(name, self.heads) and any(True for _ in module.parameters(recurse=False))
        ]


def text_encoder(model: nn.Module) -> nn.Module | None:
    """The body of a transformer for texts, which returns the last hidden states."""
    for module in model.modules():
        if getattr(module, "main_input_name", None) == "input_ids":
            return cast(nn.Module, getattr(module, "base_model", module))
    return None


def _pooled(features: Tensor, mask: Tensor | None) -> Tensor:
    """The mean over the positions of each sample: (N, D), (N, L, D) or (N, D, H, W) → (N, D)."""
    if features.dim() == 3 and mask is not None and mask.shape == features.shape[:2]:
        weights = mask.to(features)[..., None]
        return (features * weights).sum(1) / weights.sum(1).clamp(min=1)
    if features.dim() == 3:
        return features.mean(1)
    return features.flatten(2).mean(2) if features.dim() > 3 else features
