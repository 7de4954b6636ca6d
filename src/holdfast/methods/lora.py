"""LoRA: low-rank adapters beside frozen weights, through PEFT.

Hu et al., *LoRA: Low-Rank Adaptation of Large Language Models*, https://arxiv.org/abs/2106.09685.

    W = W* + s·B A,   B = 0 at the start,   s = α/r  (rsLoRA: α/√r)

The pretrained weights are in the model all the time, so no second copy is needed: B = 0 is W*.
A pull acts on B toward 0 and leaves A alone, WiSE-FT scales B, and with the adapters off the model
is the pretrained one. All of that holds for a quantised base too (QLoRA).
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor, nn

from holdfast._torch import eval_mode as _eval
from holdfast._torch.batch import unwrapped
from holdfast._torch.checks import above_zero, share, whole
from holdfast._torch.layers import within
from holdfast._torch.names import shorten
from holdfast.methods.random_init import RandomInit, seeded
from holdfast.reference import Reference
from holdfast.stages import Trainable

if TYPE_CHECKING:
    from holdfast.recipe import Recipe
    from holdfast.run import Run

__all__ = ["LoRA", "adapters_off"]


@dataclass(frozen=True)
class LoRA(Trainable):
    """Train low-rank adapters of the linear layers; what is new in the model is trained in full.

    All else is frozen, BatchNorm's statistics too. The result is PEFT's model:
    ``save_pretrained`` writes the adapters, ``merge_and_unload()`` puts them into the weights.

    Args:
        r: the rank.
        alpha: the scale α; None is 2·r, so that s = 2.
        dropout: on the input of the adapters.
        target: ``"all-linear"`` is every linear layer but the output embeddings and what is new;
            a tuple holds names or their ends, such as ``("q_proj", "v_proj")``; another text is a
            regular expression for whole names.
        rslora: scale by α/√r (https://arxiv.org/abs/2312.03732).
        dora: train the columns' norms apart from their directions
            (https://arxiv.org/abs/2402.09353). Pulls then draw the norms to their first values.

    Example:
        >>> from holdfast import LoRA, Recipe
        >>> Recipe(trainable=LoRA(r=8, target=("q_proj", "v_proj"))).name
        'lora'
    """

    neutral: ClassVar[dict[str, Any] | None] = None
    keeps_base: ClassVar[bool] = True
    uses_base: ClassVar[bool] = True

    r: int = 16
    alpha: float | None = None
    dropout: float = 0.0
    target: str | tuple[str, ...] = "all-linear"
    rslora: bool = False
    dora: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "r", whole("r", self.r, 1))
        if self.alpha is not None:
            object.__setattr__(self, "alpha", above_zero("alpha", self.alpha))
        object.__setattr__(self, "dropout", share("dropout", self.dropout))
        if not isinstance(self.target, str):
            object.__setattr__(self, "target", tuple(self.target))
        if not self.target or not all(isinstance(name, str) for name in self.target):
            raise ValueError(
                f"target must be 'all-linear', names or a pattern, got {self.target!r}"
            )

    def conflict(self, recipe: Recipe) -> str | None:
        """Frozen weights stay where they start, and DoRA's are no straight line to interpolate."""
        from holdfast.methods.wise_ft import WiseFT

        if isinstance(recipe.start, RandomInit):
            return (
                "LoRA freezes the model's weights, and RandomInit makes them random: they would "
                "never become the pretrained ones. Use Full() with RandomInit"
            )
        if self.dora and isinstance(recipe.merging, WiseFT):
            return (
                "WiseFT scales B, but with dora=True the weights are not linear in B. Use "
                "dora=False, or merging=Keep() and WiseFT on the merged model"
            )
        return None

    def prepare(self, run: Run) -> nn.Module:
        """The model inside PEFT's, with its weights frozen."""
        peft = _import_peft()
        model: nn.Module = run.model
        if hasattr(model, "peft_config"):
            raise ValueError(
                "the model has adapters already: train them with Full(), or merge them first "
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
            # Of GPT-2's layers, whose weight is (inputs, outputs), PEFT says that it has noticed.
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")
            adapted: nn.Module = peft.get_peft_model(model, config)
        if wrong := [n for n, m in adapted.named_modules() if getattr(m, "lora_embedding_A", None)]:
            raise ValueError(f"only linear layers can be adapted, not embeddings: {shorten(wrong)}")
        # The base stays the base: its statistics do not move either.
        new = [f"base_model.model.{part}" for part in run.new]
        statistics = [n for n, m in adapted.named_modules() if hasattr(m, "running_mean")]
        _eval.stay_in_eval(adapted, [n for n in statistics if not within(n, new)])
        return adapted

    def finish(self, model: nn.Module) -> nn.Module:
        """PEFT's model, adapters and all."""
        _eval.release(model)
        return model

    def anchors(self, run: Run) -> Reference | None:
        """Zero, which takes no memory, for every B; DoRA's norms as they are now. Nothing else."""
        if not run.recipe.needs_reference:
            return None
        return adapter_anchors(run.model)


def has_adapters(model: nn.Module) -> bool:
    """Whether PEFT has put LoRA's adapters into a model."""
    return any(isinstance(getattr(m, "lora_B", None), nn.ModuleDict) for m in model.modules())


def holds_its_base(model: nn.Module) -> bool:
    """Whether a model with its adapters off is what it is now, and will be when it has trained.

    So it is with adapters as PEFT first makes them, B = 0, if nothing beside them changes: no part
    that is trained in full, no running statistics.
    """
    inner = unwrapped(model)
    if not (has_adapters(inner) and hasattr(inner, "disable_adapter")):
        return False
    if any(getattr(m, "running_mean", None) is not None for m in inner.modules()):
        return False
    for name, p in inner.named_parameters():
        if ".lora_B." in name:
            if p.any():
                return False
        elif p.requires_grad and not (".lora_A." in name or ".lora_magnitude_vector." in name):
            return False
    return True


def adapter_anchors(model: nn.Module) -> Reference:
    """Where adapters are nothing: B = 0, without memory, and DoRA's norms as they are now."""
    anchors: dict[str, Tensor] = {}
    for name, p in model.named_parameters():
        if ".lora_B." in name:
            anchors[name] = p.new_zeros(()).expand(p.shape)
        elif ".lora_magnitude_vector." in name:
            anchors[name] = p.detach().clone()
    return Reference(anchors).bind(model)


@contextlib.contextmanager
def adapters_off(model: nn.Module) -> Iterator[nn.Module]:
    """The pretrained model: the same one with its adapters off, and parts that are new as first.

    Args:
        model: as :class:`LoRA` made it, perhaps inside DistributedDataParallel.

    Example:
        >>> import peft, torch
        >>> net, x = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Tanh()), torch.ones(1, 3)
        >>> before = net(x)
        >>> tuned = peft.LoraConfig(target_modules=["0"], init_lora_weights=False)  # B is not 0
        >>> with adapters_off(peft.get_peft_model(net, tuned)) as base:
        ...     bool((base(x) == before).all())
        True
    """
    inner: Any = unwrapped(model)
    if not hasattr(inner, "disable_adapter"):
        raise ValueError(f"{type(inner).__name__} has no adapters to switch off")
    flags = [(p, p.requires_grad) for p in inner.parameters()]
    try:
        with inner.disable_adapter():
            yield model
    finally:
        for p, flag in flags:  # PEFT sets them by a rule of its own
            p.requires_grad_(flag)


def linear_layers(model: nn.Module, new: Sequence[str] = ()) -> list[str]:
    """The names of all linear layers (GPT-2's too) but for the output embeddings and new parts.

    >>> linear_layers(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), new=["2"])
    ['0']
    """
    ask: Any = getattr(model, "get_output_embeddings", None)
    outputs = ask() if callable(ask) else None
    names = [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and name
        and module is not outputs
        and not within(name, new)
    ]
    if not names:
        raise ValueError(
            f"{type(model).__name__} has no linear layer for LoRA: name some in target="
        )
    return names


def _exactly(names: list[str], model: nn.Module) -> list[str] | str:
    """What names these modules to PEFT, which also takes a name for the end of other names."""
    known = set(names)
    others = [name for name, _ in model.named_modules() if name not in known]
    if any(other.endswith(f".{name}") for name in names for other in others):
        return "|".join(map(re.escape, names))
    return names


def _check_new(model: nn.Module, new: Sequence[str]) -> None:
    """PEFT trains modules in full by name, and takes a name for the end of other names."""
    names = [name for name, _ in model.named_modules()]
    for part in new:
        if part not in names:
            raise ValueError(f"new={part!r} is no module of the model, which PEFT needs")
        if others := [n for n in names if n.endswith(part) and not within(n, new)]:
            raise ValueError(
                f"PEFT cannot tell {part!r} from {shorten(others)}, which ends alike: if that is "
                "new too, add it to new=; else rename one of them"
            )


def _import_peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise ImportError('LoRA needs PEFT: pip install "holdfast[peft]"') from error
    return peft
