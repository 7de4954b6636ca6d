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

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, cast, get_args

import torch
from torch import Tensor, nn

from holdfast._torch.adapters import base_name, without_peft
from holdfast._torch.batch import logits_of
from holdfast._torch.checks import at_least_zero, one_of
from holdfast._torch.layers import head_of, within
from holdfast.methods._base_model import Outputs
from holdfast.methods._kept_outputs import KeptOutputs, kept_outputs_cost
from holdfast.methods._varied import Inputs
from holdfast.stages import (
    Checks,
    Cost,
    MedianLoss,
    Planned,
    Recall,
    RecallTerm,
    Run,
    SearchRange,
    SearchSpace,
)


@dataclass(frozen=True)
class Features(Recall):
    """The task's loss plus the relative distance of pooled features from the pretrained model's.

    The features of a transformer for texts are the mean of its last hidden states. Those of any
    other model are the input of its head, averaged over positions. z* comes from the same model
    with its adapters off (:class:`~holdfast.LoRA`), or from a frozen copy of the model.

    Args:
        strength: the weight of the distance; 0 turns it off. The preset ``holdfast`` uses 0.1 for
            encoders of texts and 0.3 for image models.
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

    @property
    def changes_loss(self) -> bool:
        return self.strength != 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.03, 3.0, 0.3)}

    def cost(self, planned: Planned) -> Cost:
        return kept_outputs_cost(planned) if self.strength else Cost()

    def prepare(self, run: Run) -> RecallTerm:
        if self.strength == 0:
            return RecallTerm()
        if not isinstance(run.task, str):
            raise ValueError(
                "Features needs batches of inputs and labels, which a loss function hides: pass "
                "the name of a task as task=, or use another recall"
            )
        pooled = pooled_features(run.model, run.new)
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


def pooled_features(model: nn.Module, new: Sequence[str]) -> Outputs:
    """The function that runs such a model and returns its features, one row per sample.

    Args:
        model: a transformer for texts, or a model with a head.
        new: its new parts. If none is in the head, the head is found by the model's structure.
    """
    inner = without_peft(model)
    if text_encoder(inner) is not None:
        return _hidden_states
    heads, found = [*map(base_name, new)], head_of(inner)
    if found and not any(within(found, [part]) or within(part, [found]) for part in heads):
        heads.append(found)
    if not heads:
        children = ", ".join(name for name, _ in inner.named_children())
        raise ValueError(
            f"the head of {type(inner).__name__} is not known, so its features are not either: "
            f"name the part that computes the outputs in new=, one of {children}"
        )
    return partial(_inputs_of, heads)


def _hidden_states(model: nn.Module, inputs: Any) -> Tensor:
    """The mean of the last hidden states of a transformer for texts."""
    found: list[Tensor] = []

    def catch(_: nn.Module, args: Any, output: Any) -> None:
        state = getattr(output, "last_hidden_state", None)
        state = output[0] if state is None and isinstance(output, tuple) else state
        found.extend([state] if isinstance(state, Tensor) else [])

    inner = without_peft(model)
    with cast(nn.Module, text_encoder(inner)).register_forward_hook(catch):
        logits_of(model, inputs, features=True)
    if not found:
        raise ValueError(
            f"{type(inner).__name__} has no features: it returns no last hidden state. Use another "
            "recall"
        )
    mask = inputs.get("attention_mask") if isinstance(inputs, Mapping) else None
    return _pooled(found[0], mask)


def _inputs_of(heads: Sequence[str], model: nn.Module, inputs: Any) -> Tensor:
    """What the heads read: the input of the first of their layers after all other layers."""
    found: list[Tensor] = []

    def of_head(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.extend(x for x in args[:1] if isinstance(x, Tensor) and x.is_floating_point())

    def of_body(_: nn.Module, args: tuple[Any, ...]) -> None:
        found.clear()  # a part that has run before, such as a new stem, is no head

    inner = without_peft(model)
    with ExitStack() as hooks:
        for name, layer in inner.named_modules():
            # Layers with parameters only: a head may start with dropout or pooling.
            if any(True for _ in layer.parameters(recurse=False)):
                catch = of_head if within(name, heads) else of_body
                hooks.enter_context(layer.register_forward_pre_hook(catch))
        logits_of(model, inputs, features=True)
    if not found:
        raise ValueError(
            f"{type(inner).__name__} has no features: it did not run {', '.join(heads)} after all "
            "other layers. Name the part that computes the outputs in new="
        )
    return _pooled(found[0])


def text_encoder(model: nn.Module) -> nn.Module | None:
    """The body of a transformer for texts, which returns the last hidden states."""
    for module in model.modules():
        if getattr(module, "main_input_name", None) == "input_ids":
            return cast(nn.Module, getattr(module, "base_model", module))
    return None


def _pooled(features: Tensor, mask: Tensor | None = None) -> Tensor:
    """The mean over the positions of each sample: (N, D), (N, L, D) or (N, D, H, W) → (N, D)."""
    if features.dim() == 3 and mask is not None and mask.shape == features.shape[:2]:
        weights = mask.to(features)[..., None]
        return (features * weights).sum(1) / weights.sum(1).clamp(min=1)
    if features.dim() == 3:
        return features.mean(1)
    return features.flatten(2).mean(2) if features.dim() > 3 else features
