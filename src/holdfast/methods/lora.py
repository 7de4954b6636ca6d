"""LoRA: low-rank adapters beside frozen weights, through PEFT.

Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, https://arxiv.org/abs/2106.09685.

    W = W* + s·B A,   B = 0 at the start,   s = α/r  (rsLoRA: α/√r)

The model keeps the pretrained weights, so no second copy is needed: B = 0 gives W*. A pull acts on
B, toward 0, and not on A. WiSE-FT scales B. With the adapters off, the model is the pretrained one.
All of this holds for a quantized base as well (QLoRA).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast._torch.checks import above_zero, positive_integer, share
from holdfast.methods._adapting import (
    Adapting,
    exact_target,
    feed_forward_layers,
    linear_layers,
)
from holdfast.stages import Checks, MedianLoss, Recipe, Run, SearchRange, SearchSpace


@dataclass(frozen=True)
class LoRA(Adapting):
    """Train low-rank adapters of the linear layers. New parts of the model are trained in full.

    Everything else is frozen, including BatchNorm's statistics. The result is a PEFT model:
    ``save_pretrained`` writes the adapters, ``merge_and_unload()`` adds them to the weights.

    Args:
        r: the rank.
        alpha: the scale α. If None, it is 2·r, which gives s = 2.
        dropout: the dropout on the input of the adapters.
        target: ``"all-linear"`` is every linear layer except the output embeddings and new parts,
            and of a multimodal language model only those of the decoder. ``"mlp"`` is those of the
            feed-forward blocks: the linear layers of numbered layers, apart from attention. A tuple
            lists names or suffixes of names, such as ``("q_proj", "v_proj")``. Any other string is
            a regular expression for whole names.
        rslora: scale by α/√r (https://arxiv.org/abs/2312.03732).
        dora: train the norms of columns separately from their directions
            (https://arxiv.org/abs/2402.09353). Pulls then lead the norms to their initial values.

    Example:
        >>> from holdfast import LoRA, Recipe
        >>> Recipe(trainable=LoRA(r=8, target=("q_proj", "v_proj"))).name
        'lora'
    """

    checks: ClassVar[Checks] = {"r": positive_integer, "alpha": above_zero, "dropout": share}

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
                f"target must be 'all-linear', 'mlp', names or a pattern, got {self.target!r}"
            )

    def conflict(self, recipe: Recipe) -> str | None:
        if self.dora and recipe.merging.interpolates:
            merging = type(recipe.merging).__name__
            return (
                f"{merging} scales B, but with dora=True the weights are not linear in B. Use "
                f"dora=False, or train without {merging} and use 'holdfast merge', which reads "
                "adapters"
            )
        if self.dora and recipe.recall.interpolates:
            return (
                f"{type(recipe.recall).__name__} scales B in the end if necessary, but with "
                "dora=True the weights are not linear in B: use dora=False"
            )
        return None

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"r": SearchRange(1, 128, 16)}

    def peft_config(self, peft: Any, run: Run) -> Any:
        target: Any = self.target
        if target in _NAMED_TARGETS:
            target = exact_target(_NAMED_TARGETS[target](run.model, run.new), run.model)
        elif not isinstance(target, str):
            target = list(target)
        alpha = 2 * self.r if self.alpha is None else self.alpha
        return peft.LoraConfig(
            r=self.r,
            lora_alpha=int(alpha) if alpha == int(alpha) else alpha,
            lora_dropout=self.dropout,
            target_modules=target,
            use_rslora=self.rslora,
            use_dora=self.dora,
        )


_NAMED_TARGETS = {"all-linear": linear_layers, "mlp": feed_forward_layers}
