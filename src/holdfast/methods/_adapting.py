"""Train adapters of PEFT beside frozen weights: the preparation of a model, for all of them."""

import re
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.adapter_probe import adapter_layers
from holdfast._torch.adapters import adapter_origin
from holdfast._torch.imports import require
from holdfast._torch.layers import block_of, category_of, within
from holdfast._torch.multimodal import text_part
from holdfast._torch.names import shorten
from holdfast._torch.rng import seeded
from holdfast.methods._freezing import Freezing, stay_in_eval
from holdfast.reference import Reference
from holdfast.stages import Run


class Adapting(Freezing):
    """A method that trains adapters. With them off, the model is the pretrained one."""

    neutral: ClassVar[dict[str, Any] | None] = None
    keeps_base: ClassVar[bool] = True
    uses_base: ClassVar[bool] = True
    needs_pretrained_start: ClassVar[str] = "freezes the model's weights"

    @abstractmethod
    def peft_config(self, peft: Any, run: Run) -> Any:
        """Return the configuration of the adapters of ``run.model``, with their targets."""

    def prepare(self, run: Run) -> nn.Module:
        """Add adapters. New parts of the model are trained in full."""
        peft = require("peft", extra="peft", what=type(self).__name__)
        model = run.model
        if hasattr(model, "peft_config"):
            raise ValueError(
                f"the model already has adapters: leave out {type(self).__name__} to train them, "
                "or merge them first (merge_and_unload)"
            )
        _check_new(model, run.new)
        config = self.peft_config(peft, run)
        config.modules_to_save = [*run.new, *(config.modules_to_save or ())] or None
        if run.task == "causal_lm" and hasattr(model, "prepare_inputs_for_generation"):
            config.task_type = "CAUSAL_LM"
        with seeded(run.seed), warnings.catch_warnings():
            # PEFT warns that it has detected GPT-2's layers, whose weight is (inputs, outputs).
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            adapted: nn.Module = peft.get_peft_model(model, config)
        layers = adapter_layers(adapted).items()
        if wrong := [n for n, m in layers if isinstance(m.get_base_layer(), nn.Embedding)]:
            raise ValueError(
                f"the layers to adapt must be linear, got embeddings: {shorten(wrong)}"
            )
        # The statistics of the base must not change either.
        new = [f"base_model.model.{part}" for part in run.new]
        statistics = [n for n, m in adapted.named_modules() if hasattr(m, "running_mean")]
        stay_in_eval(adapted, [n for n in statistics if not within(n, new)])
        return adapted

    def anchors(self, run: Run) -> Reference | None:
        """The values of the adapters at which they change nothing: 0 for every B of LoRA."""
        if not run.recipe.needs_reference:
            return None
        return Reference(adapter_origin(run.model)).bind(run.model)


def exact_target(names: list[str], model: nn.Module) -> list[str] | str:
    """A target for exactly these modules: PEFT also treats a name as a suffix of other names."""
    known = set(names)
    others = [name for name, _ in model.named_modules() if name not in known]
    if any(other.endswith(f".{name}") for name in names for other in others):
        return "|".join(map(re.escape, names))
    return names


def linear_layers(model: nn.Module, new: Sequence[str] = ()) -> list[str]:
    """The names of all linear layers, except the output embeddings and new parts.

    Of a multimodal language model, only those of its decoder. Of a Mamba layer, only the first: its
    fused kernels read the weights of the others, and would miss the adapters.

    >>> linear_layers(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), new=["2"])
    ['0']
    """
    ask: Any = getattr(model, "get_output_embeddings", None)
    outputs = ask() if callable(ask) else None
    readers = {*text_part(model).modules()}
    mambas = [module for module in readers if hasattr(module, "A_log")]
    fused = {child for m in mambas for n, child in m.named_children() if n != "in_proj"}
    names = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and name
        and module in readers
        and module not in {outputs, *fused}
        and not within(name, new)
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer besides its head and new parts: name "
            "other layers in the recipe, or use another method"
        )
    return names


def feed_forward_layers(model: nn.Module, new: Sequence[str] = ()) -> list[str]:
    """The names of the linear layers in numbered layers that are not part of attention or Mamba."""
    mambas = [name for name, module in model.named_modules() if hasattr(module, "A_log")]
    blocks = block_of(model)
    names = []
    for name in linear_layers(model, new):
        block, module = blocks.get(f"{name}.weight"), model.get_submodule(name)
        inside = block is not None and not within(name, mambas)
        if inside and category_of(name[len(block or "") :], module) == "feed-forward":
            names.append(name)
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no feed-forward layers (linear layers in numbered blocks, "
            "apart from attention) for adapters: name layers in the setting target of the recipe"
        )
    return names


def _check_new(model: nn.Module, new: Sequence[str]) -> None:
    """Check that PEFT, which treats a name as a suffix, can find the new parts."""
    names = [name for name, _ in model.named_modules()]
    for part in new:
        if part not in names:
            raise ValueError(
                f"new={part!r} must be a module of the model, because PEFT trains whole modules"
            )
        if others := [n for n in names if n.endswith(part) and not within(n, new)]:
            raise ValueError(
                f"PEFT cannot distinguish {part!r} from {shorten(others)}, which has the same "
                "suffix: add that to new= if it is new too, or rename one of them"
            )
