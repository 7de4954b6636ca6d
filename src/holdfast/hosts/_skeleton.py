"""The sizes of a training, counted on a model whose tensors have shapes but no values.

Stage 1 of a recipe prepares the model, and one sample runs forward and backward. Nothing is loaded
or computed, so a configuration is enough, and a model of any size takes a few seconds.
"""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from holdfast._torch.adapters import without_peft
from holdfast._torch.head_tap import divisible_head
from holdfast._torch.layers import block_of
from holdfast._torch.multimodal import freeze_other_parts
from holdfast.io.files import first_line
from holdfast.losses import TOKEN_TASKS
from holdfast.recipe import Recipe
from holdfast.run import Run

_PHASES = 16  # points of a run at which the trained parameters are looked up
_ANY_RATE = 1e-4  # sizes do not depend on the learning rate


@dataclass(frozen=True)
class Parts:
    """The tensors of a prepared model. Sizes are in bytes.

    Attributes:
        weights: the size of all parameters and buffers.
        count: the number of parameters.
        trained: the number of parameters that are trained at any time.
        gradients: the size of their gradients.
        anchors: the number of pretrained values that are kept for later.
        blocks: the number of numbered blocks.
        block: the number of parameters of the largest one.
        outside: the number of parameters outside of blocks, such as embeddings and head.
        width: the size of a hidden state; 0 if it is not known.
    """

    weights: int
    count: int
    trained: int
    gradients: int
    anchors: int
    blocks: int
    block: int
    outside: int
    width: int


@dataclass(frozen=True)
class Passes:
    """A forward and a backward pass of one sample.

    Attributes:
        kept: bytes that a sample keeps for the backward pass.
        kept_once: bytes that are kept once for all samples, such as weights that autocast has cast.
        outputs: the shape of the outputs.
        head: the number of trained parameters of the output layer, if the loss computes a chunk of
            its logits at a time; None if it needs all outputs at once.
        forward: operations of the forward pass.
        training: operations of both passes.
        is_image: whether the sample is an image.
    """

    kept: int
    kept_once: int
    outputs: torch.Size
    head: int | None
    forward: float
    training: float
    is_image: bool


@dataclass(frozen=True)
class Prepared:
    """A recipe as it is resolved for a model, and the sizes of its training.

    Attributes:
        is_token: whether every token is a target.
        needs_old_data: whether it cannot be used without data of the old task.
        refusal: why a training with this model would refuse it, or None.
    """

    recipe: Recipe
    parts: Parts
    passes: Passes
    is_token: bool
    needs_old_data: bool
    refusal: str | None


class _UnloadedRun(Run):
    """Stage 1 of a run, on a model without values."""

    def _fingerprint_of_base(self) -> str | None:
        return None


def prepare(
    skeleton: Callable[[], nn.Module],
    recipe: Recipe,
    *,
    length: int,
    dtype: torch.dtype,
    is_half: bool,
) -> Prepared:
    """Prepare a model by a recipe, and count what a training consists of.

    Args:
        skeleton: makes the model on torch's device ``meta``.
        recipe: the recipe.
        length: the tokens of a sample.
        dtype: of the weights.
        is_half: whether the model runs under autocast to bfloat16.
    """
    run = _stage_1(skeleton().to(dtype), recipe)
    parts, is_token = _parts(run), run.task in TOKEN_TASKS
    methods = [method for _, method in run.recipe]
    refusal = next(filter(None, (method.unfit(run.model, True) for method in methods)), None)
    needs_old_data = refusal is None and any(method.unfit(run.model, False) for method in methods)
    try:
        try:
            passes = _passes(run, length, is_half)
        except RuntimeError:  # kernels of mixtures of experts take bfloat16 only, also in autocast
            half = _stage_1(skeleton().to(torch.bfloat16), recipe)
            passes = _passes(half, length, is_half=False)
    except Exception as error:  # code of any model, on tensors without values
        raise ValueError(
            f"{type(without_peft(run.model)).__name__} does not run without its weights "
            f"({first_line(error)}): plan takes causal language models, and classifiers of texts "
            "and images"
        ) from error
    return Prepared(run.recipe, parts, passes, is_token, needs_old_data, refusal)


def _stage_1(model: nn.Module, recipe: Recipe) -> Run:
    freeze_other_parts(model)
    return _UnloadedRun(recipe, model, lr=_ANY_RATE, new=(), progress=False)


def _parts(run: Run) -> Parts:
    model, named = run.model, dict(run.model.named_parameters())
    trained: dict[str, Tensor] = {}
    for phase in range(1, _PHASES + 1):
        run.recipe.trainable.advance(model, phase, _PHASES)
        trained |= {name: p for name, p in named.items() if p.requires_grad}
    blocks: dict[str | None, int] = {None: 0}
    for name, block in block_of(model).items():
        blocks[block] = blocks.get(block, 0) + named[name].numel()
    outside = blocks.pop(None)
    anchors = () if run.anchors is None else run.anchors.values()
    config: Any = getattr(without_peft(model), "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return Parts(
        weights=sum(t.nbytes for t in (*named.values(), *model.buffers())),
        count=sum(p.numel() for p in named.values()),
        trained=sum(p.numel() for p in trained.values()),
        gradients=sum(p.nbytes for p in trained.values()),
        anchors=sum(t.numel() for t in anchors),
        blocks=len(blocks),
        block=max(blocks.values(), default=0),
        outside=outside,
        width=getattr(text, "hidden_size", 0),
    )


def _passes(run: Run, length: int, is_half: bool) -> Passes:
    model, counters = run.model, (_operations(), _operations())
    # Models look at values of inputs on ``meta``, but know that a fake tensor has none.
    with (
        FakeTensorMode(allow_non_fake_inputs=True),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
        _quiet(logging.getLogger("torch._subclasses.fake_tensor")),
    ):
        model.to_empty(device="cpu").train()
        for part in model.modules():
            if hasattr(
                part, "layerdrop"
            ):  # it skips layers by random numbers, which have no values
                part.training = False
        sample = _samples(1, model, length)
        head = divisible_head(model, sample) if run.task == "causal_lm" else None
        last = None if head is None else head.layer
        with _saved(model, last) as one, counters[0]:
            outputs = model(**sample).logits
        with counters[1]:
            outputs.sum().backward()
        with _saved(model, last) as two:
            model(**_samples(2, model, length))
    forward, backward = (float(counter.get_total_flops()) for counter in counters)
    each = sum(two.values()) - sum(one.values())
    return Passes(
        kept=each,
        kept_once=sum(one.values()) - each,
        outputs=outputs.shape,
        head=None if head is None else sum(p.numel() for p in (head.trained() or {}).values()),
        forward=forward,
        training=forward + backward,
        is_image=takes_images(model),
    )


def _samples(count: int, model: nn.Module, length: int) -> dict[str, Any]:
    """Some samples: texts, or images of the size that the model expects."""
    if not takes_images(model):
        ids = torch.zeros(count, length, dtype=torch.int64)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    config = without_peft(model).config
    config = getattr(config, "vision_config", config)  # of a model of texts and images
    size = getattr(config, "image_size", 224)
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    shape = (count, getattr(config, "num_channels", 3), *sides)
    return {"pixel_values": torch.zeros(shape, dtype=next(model.parameters()).dtype)}


def takes_images(model: nn.Module) -> bool:
    """Whether the samples of a model are images."""
    return getattr(without_peft(model), "main_input_name", "") == "pixel_values"


def _operations() -> FlopCounterMode:
    """A counter of operations that also knows the attention of a CPU, and experts."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._grouped_mm: lambda a, b, *_, **__: 2 * math.prod(a) * b[-1],
            aten._scaled_dot_product_flash_attention_for_cpu: (
                lambda q, k, v, *_, **__: sdpa_flop_count(q, k, v)
            ),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda g, q, k, v, *_, **__: sdpa_backward_flop_count(g, q, k, v)
            ),
        },
    )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence the log of an error that is handled."""
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _saved(model: nn.Module, last: nn.Module | None = None) -> Iterator[dict[int, int]]:
    """Collect the sizes of all tensors that autograd saves, except weights, each once.

    If there is a ``last`` layer, what is saved after it is not counted.
    """
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, int] = {}
    ended: list[bool] = []
    alive = []  # a freed storage would make room for another one with the same number

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and not ended:
            kept[storage._cdata] = storage.nbytes()
            alive.append(storage)
        return tensor

    end = last.register_forward_hook(lambda *_: ended.append(True)) if last else nullcontext()
    with end, saved_tensors_hooks(save, lambda tensor: tensor):
        yield kept
