"""LoRA: low-rank adapters beside frozen weights, through PEFT.

Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, https://arxiv.org/abs/2106.09685.

    W = W* + s·B A,   B = 0 at the start,   s = α/r  (rsLoRA: α/√r)

The model keeps the pretrained weights, so no second copy is needed: B = 0 gives W*. A pull acts on
B, toward 0, and not on A. WiSE-FT scales B. With the adapters off, the model is the pretrained one.
All of this holds for a quantized base as well (QLoRA).
"""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from holdfast._torch.adapters import adapter_origin
from holdfast._torch.checks import above_zero, positive_integer, share
from holdfast._torch.imports import require
from holdfast._torch.layers import within
from holdfast._torch.multimodal import text_part
from holdfast._torch.names import shorten
from holdfast._torch.rng import seeded
from holdfast.methods._freezing import Freezing, stay_in_eval
from holdfast.reference import Reference
from holdfast.stages import Checks, MedianLoss, Recipe, Run, SearchRange, SearchSpace


@dataclass(frozen=True)
class LoRA(Freezing):
    """Train low-rank adapters of the linear layers. New parts of the model are trained in full.

    Everything else is frozen, including BatchNorm's statistics. The result is a PEFT model:
    ``save_pretrained`` writes the adapters, ``merge_and_unload()`` adds them to the weights.

    Args:
        r: the rank.
        alpha: the scale α. If None, it is 2·r, which gives s = 2.
        dropout: the dropout on the input of the adapters.
        target: ``"all-linear"`` is every linear layer except the output embeddings and new parts,
            and of a multimodal language model only those of the decoder. A tuple lists names or
            suffixes of names, such as ``("q_proj", "v_proj")``. Any other string is a regular
            expression for whole names.
        rslora: scale by α/√r (https://arxiv.org/abs/2312.03732).
        dora: train the norms of columns separately from their directions
            (https://arxiv.org/abs/2402.09353). Pulls then lead the norms to their initial values.

    Example:
        >>> from holdfast import LoRA, Recipe
        >>> Recipe(trainable=LoRA(r=8, target=("q_proj", "v_proj"))).name
        'lora'
    """

    checks: ClassVar[Checks] = {"r": positive_integer, "alpha": above_zero, "dropout": share}
    neutral: ClassVar[dict[str, Any] | None] = None
    keeps_base: ClassVar[bool] = True
    uses_base: ClassVar[bool] = True
    needs_pretrained_start: ClassVar[str] = "freezes the model's weights"

    r: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target: str | tuple[str, ...] = "all-linear"
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", tuple(self.target))
        if not self.target or not all(isinstance(name, str) for name in self.target):
            raise ValueError(
                f"target must be 'all-linear', names or a pattern, got {self.target!r}"
            )

    def conflict(self, recipe: Recipe) -> str | None:
        if self.dora and recipe.merging.interpolates:
            merging = type(recipe.merging).__name__
            return (
                f"{merging} scales B, but with dora=True the weights are not linear in B. Use "
                f"dora=False, or train without {merging} and apply it to the merged model"
            )
        if self.dora and recipe.recall.interpolates:
            return (
                f"{type(recipe.recall).__name__} scales B in the end if necessary, but with "
                "dora=True the weights are not linear in B: use dora=False"
            )
        return None

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"r": SearchRange(1, 128, 16)}

    def prepare(self, run: Run) -> nn.Module:
        peft = require("peft", extra="peft", what="LoRA")
        model = run.model
        if hasattr(model, "peft_config"):
            raise ValueError(
                "the model already has adapters: leave out LoRA to train them, or merge them first "
                "(merge_and_unload)"
            )
        _check_new(model, run.new)
        target: Any = self.target
        if target == "all-linear":
            target = _exactly(linear_layers(model, run.new), model)
        elif not isinstance(target, str):
            target = list(target)
        alpha = 2 * self.r if self.alpha is None else self.alpha
        generates = run.task == "causal_lm" and hasattr(model, "prepare_inputs_for_generation")
        config = peft.LoraConfig(
            r=self.r,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
            lora_dropout=self.dropout,
            target_modules=target,
            modules_to_save=list(run.new) or None,
            use_rslora=self.rslora,
            use_dora=self.dora,
            task_type="CAUSAL_LM" if generates else None,
        )
        with seeded(run.seed), warnings.catch_warnings():
            # PEFT warns that it has detected GPT-2's layers, whose weight is (inputs, outputs).
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            adapted: nn.Module = peft.get_peft_model(model, config)
        if wrong := [n for n, m in adapted.named_modules() if getattr(m, "lora_embedding_A", None)]:
            raise ValueError(
                f"target must match linear layers only, got embeddings: {shorten(wrong)}"
            )
        # The statistics of the base must not change either.
        new = [f"base_model.model.{part}" for part in run.new]
        statistics = [n for n, m in adapted.named_modules() if hasattr(m, "running_mean")]
        stay_in_eval(adapted, [n for n in statistics if not within(n, new)])
        return adapted

    def anchors(self, run: Run) -> Reference | None:
        """0 for every B, and the current norms of DoRA."""
        if not run.recipe.needs_reference:
            return None
        return Reference(adapter_origin(run.model)).bind(run.model)


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
            f"{type(model).__name__} has no linear layer for LoRA: name other layers in the "
            "setting target of the recipe"
        )
    return names


def _exactly(names: list[str], model: nn.Module) -> list[str] | str:
    """A target for exactly these modules: PEFT also treats a name as a suffix of other names."""
    known = set(names)
    others = [name for name, _ in model.named_modules() if name not in known]
    if any(other.endswith(f".{name}") for name in names for other in others):
        return "|".join(map(re.escape, names))
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
