"""Random initialization: the start RI of the RecAdam paper.

The model starts from random weights and is pulled to the pretrained ones while λ is small, which
lets it explore. The pretrained weights are anchors only (https://arxiv.org/abs/2004.12651).
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from holdfast._torch.checks import named_settings, natural_number
from holdfast._torch.fingerprint import tensor_fingerprints
from holdfast._torch.names import shorten
from holdfast._torch.rng import seeded
from holdfast.stages import Checks, Recipe, Run, Start

ModelT = TypeVar("ModelT", bound=nn.Module)


@dataclass(frozen=True)
class RandomInit(Start):
    """Start from random weights, with a pull to the pretrained ones.

    Args:
        seed: seeds the weights. If None, the run's seed is used.

    Example:
        >>> from holdfast import RandomInit, RecAdamUpdate, Recipe
        >>> Recipe(start=RandomInit(), update=RecAdamUpdate()).name
        'random-init+recadam'
    """

    checks: ClassVar[Checks] = {"seed": natural_number}
    neutral: ClassVar[dict[str, Any] | None] = None
    needs_reference: ClassVar[bool] = True

    seed: int | None = None

    def conflict(self, recipe: Recipe) -> str | None:
        trainable = recipe.trainable
        if reason := trainable.needs_pretrained_start:
            return (
                f"{type(trainable).__name__} {reason}, and RandomInit makes the weights random: "
                "leave out one of the two"
            )
        if recipe.update.pulls or any(penalty.acts for penalty in recipe.penalties):
            return None
        return (
            "RandomInit discards the pretrained weights, and nothing in the recipe pulls back to "
            "them: add an update or a penalty that does (presets recadam, l2-sp), or leave out "
            "RandomInit"
        )

    def apply(self, run: Run) -> None:
        frozen = [(p, p.detach().clone()) for p in run.model.parameters() if not p.requires_grad]
        random_init(run.model, seed=run.seed if self.seed is None else self.seed)
        with torch.no_grad():
            for p, pretrained in frozen:  # frozen by the user: they must stay pretrained
                p.copy_(pretrained)


@named_settings
def random_init(model: ModelT, *, seed: int | None = None) -> ModelT:
    """Initialize all weights of a model again, in place, with its own initializer.

    Keep the pretrained weights first: ``Reference.of(model)``.

    Args:
        model: a transformers model, or a module whose layers have ``reset_parameters()``.
        seed: seeds the new weights, without changing torch's global generators.

    Returns:
        The same model.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(4, 2)
        >>> anchors = holdfast.Reference.of(model)
        >>> _ = holdfast.random_init(model, seed=0)
        >>> optimizer = holdfast.RecAdam(model.named_parameters(), anchors=anchors)
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"random_init needs a model, got {type(model).__name__}")
    before = tensor_fingerprints((p.shape, p) for p in model.parameters())
    with seeded(seed), torch.no_grad():
        transformers_models = list(_transformers_models(model))
        covered = {id(p) for m in transformers_models for p in m.parameters()}
        resets = _find_resets(model, covered)
        for part in transformers_models:
            _init_transformers(part)
        for reset in resets:
            reset()
    after = tensor_fingerprints((p.shape, p) for p in model.parameters())
    same = [
        name
        for (name, p), old, new in zip(model.named_parameters(), before, after, strict=True)
        if old == new and p.numel() and (p != p.flatten()[0]).any()
    ]
    if same:
        warnings.warn(
            f"the model's own initializer did not change {len(same)} parameters: {shorten(same)}",
            stacklevel=3,
        )
    return model


def _transformers_models(module: nn.Module) -> Iterator[nn.Module]:
    """The transformers models that are not inside another one."""
    if hasattr(module, "_init_weights") and hasattr(module, "init_weights"):
        yield module
    else:
        for child in module.children():
            yield from _transformers_models(child)


def _init_transformers(model: Any) -> None:
    # from_pretrained marks modules and tensors as initialized, and init_weights() skips those.
    for marked in [*model.modules(), *model.parameters(), *model.buffers()]:
        if hasattr(marked, "_is_hf_initialized"):
            del marked._is_hf_initialized
    model.init_weights()


def _find_resets(model: nn.Module, covered: set[int]) -> list[Callable[[], object]]:
    """The initializers of all layers that are not covered. Raises if a parameter has none."""
    resets = []
    reached = set(covered)
    # Children first, as in construction: a parent may initialize its children again.
    for module in reversed(list(model.modules())):
        # nn.MultiheadAttention spells it with an underscore.
        underscored = getattr(module, "_reset_parameters", None)
        reset = getattr(module, "reset_parameters", underscored)
        if callable(reset) and not all(id(p) in covered for p in module.parameters()):
            resets.append(reset)
            reached.update(id(p) for p in module.parameters(recurse=False))
    missed = [name for name, p in model.named_parameters() if id(p) not in reached]
    if missed:
        raise ValueError(
            "these parameters have no initializer, because their modules have no "
            f"reset_parameters(): {shorten(missed)}. Add that method to their modules"
        )
    return resets
