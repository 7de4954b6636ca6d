"""What a training would need, before it starts: memory per GPU, and time per update.

The sizes of the model are counted (``_skeleton``), methods say what they cost (``Method.cost``),
and the speed of a GPU was measured: ``measured.json``, which ``benchmarks/constants.py`` writes.
"""

import contextlib
import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from holdfast._torch.checks import NamedSettings, above_zero, flag, one_of, whole_number
from holdfast._torch.lm_head import LARGE_CHUNK
from holdfast.hosts._skeleton import Prepared, prepare, takes_images
from holdfast.hosts._updates import number_of_updates
from holdfast.hosts.job import Training
from holdfast.io.heads import NewHead, model_kind
from holdfast.io.models import Loader
from holdfast.recipe import Recipe, preset_that
from holdfast.report.document import Document
from holdfast.report.forecast import forecast_document
from holdfast.report.shown import Shown
from holdfast.scoring.scorer import TOKENS
from holdfast.stages import Cost, Planned

Gpu = Literal["H200", "H100", "A100", "B200"]
#: Memory in GB, bandwidth in bytes and dense bfloat16 operations per second: NVIDIA's data sheets.
GPUS: dict[Gpu, tuple[float, float, float]] = {
    "H200": (141, 4.8e12, 989e12),
    "H100": (80, 3.35e12, 989e12),
    "A100": (80, 2.04e12, 312e12),
    "B200": (180, 8.0e12, 2250e12),
}
_MEASURED: Gpu = "H200"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Bytes per output of the loss: its float32 input, the log-probabilities and their gradient.
_LOSS = 12
#: Bytes per logit of a chunk: in half precision, in float32, and log-probabilities, in whose place
#: the gradient is computed. Methods that need more have smaller chunks.
_CHUNKED = 10
_SAMPLES_BEFORE = 8  # per batch of an importance


@functools.cache
def measured() -> dict[str, Any]:
    """The measured constants, with the machine and the files that they come from."""
    text = (Path(__file__).parent / "measured.json").read_text(encoding="utf-8")
    found: dict[str, Any] = json.loads(text)
    return found


@dataclass(frozen=True)
class Machines(NamedSettings):
    """The machines of a planned training, and the amount of its data.

    Attributes:
        gpus: number of GPUs.
        gpu: kind of GPU; its memory, and its speed relative to the measured one, an H200.
        gpu_memory: memory of a GPU in GB; by default that of its kind.
        shard: shard weights, gradients, optimizer state and θ* over all GPUs (FSDP2).
        anchors: where θ* is, if the recipe needs it: ``"device"`` is a copy on the GPU, which
            `holdfast finetune` makes; ``"host"`` is CPU memory, for training in Python with
            reference=Reference.open(DIR). Each GPU has its shard of θ* either way, and a copy on
            the GPU stays whole beside it.
        anchor_dtype: dtype of θ*; by default that of the weights. The files of a bfloat16 model
            hold it in bfloat16: reference=Reference.open(...).
        data_size: number of training samples.
    """

    gpus: int = 1
    gpu: Gpu = "H200"
    gpu_memory: float | None = None
    shard: bool = True
    anchors: Literal["device", "host"] = "device"
    anchor_dtype: Literal["float32", "bfloat16"] | None = None
    data_size: int = 10_000

    def __post_init__(self) -> None:
        whole_number("gpus", self.gpus, 1)
        whole_number("data_size", self.data_size, 1)
        one_of("gpu", self.gpu, get_args(Gpu))
        one_of("anchors", self.anchors, ("device", "host"))
        flag("shard", self.shard)
        if self.gpu_memory is not None:
            above_zero("gpu_memory", self.gpu_memory)
        if self.anchor_dtype is not None:
            one_of("anchor_dtype", self.anchor_dtype, tuple(_DTYPES))

    @property
    def ranks(self) -> int:
        """The number of GPUs that share one copy of the weights."""
        return self.gpus if self.shard else 1

    @property
    def memory(self) -> float:
        """Bytes of memory of a GPU."""
        return 1e9 * (GPUS[self.gpu][0] if self.gpu_memory is None else self.gpu_memory)


@dataclass(frozen=True)
class Needs:
    """What a training needs.

    Attributes:
        memory: bytes per GPU in training, by what they hold.
        whole: bytes per GPU before the model is sharded, by what they hold: `holdfast finetune`
            loads the whole model onto every GPU. Empty if it is not sharded.
        on_cpu: bytes of CPU memory per process, by what they hold.
        update: seconds per update, by what they are spent on.
        before: seconds before training, by what they are spent on.
    """

    memory: dict[str, float]
    on_cpu: dict[str, float]
    update: dict[str, float]
    before: dict[str, float]
    whole: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> float:
        """All bytes per GPU in training."""
        return sum(self.memory.values())

    @property
    def whole_bytes(self) -> float:
        """All bytes per GPU before the model is sharded."""
        return sum(self.whole.values())

    def fit(self, room: float) -> bool:
        """Whether a GPU with ``room`` bytes has enough memory, before and in training."""
        return max(self.bytes, self.whole_bytes) <= room

    def never_whole(self, room: float) -> bool:
        """Whether the weights alone have no room before they are sharded, whatever is changed."""
        return self.whole.get("weights", 0) > room

    @property
    def seconds(self) -> float:
        """All seconds per update."""
        return sum(self.update.values())


@dataclass(frozen=True, repr=False)
class Forecast(Shown):
    """An estimate of what a training needs, beside plain fine-tuning.

    Attributes:
        model, recipe: their names.
        resolved: the methods of the recipe for this model.
        weights, trained: the number of weights, and of those that are trained.
        machines, training: the settings.
        needs, plain: of the recipe, and of plain fine-tuning.
        fits: whether the recipe fits into the memory of a GPU, before and in training.
        changes: settings with which it would fit, and the bytes per GPU that it would then need.
            If the whole model does not fit before it is sharded, they are about training alone.
        source: where the constants come from.
        remarks: sentences about this training.
    """

    what = "forecast"

    model: str
    recipe: str
    resolved: str
    weights: int
    trained: int
    updates: int
    machines: Machines
    training: dict[str, Any]
    needs: Needs
    plain: Needs
    fits: bool
    changes: dict[str, float]
    source: str
    remarks: tuple[str, ...] = ()
    schema_version: int = field(default=1)

    @property
    def x_time(self) -> float:
        """The time of an update relative to plain fine-tuning."""
        return self.needs.seconds / self.plain.seconds

    def document(self) -> Document:
        return forecast_document(self)

    def rows(self) -> list[dict[str, Any]]:
        """Bytes and seconds of the recipe and of plain fine-tuning."""
        found = []
        for figure in ("memory", "whole", "on_cpu", "update", "before"):
            ours, plain = getattr(self.needs, figure), getattr(self.plain, figure)
            found += [
                {"figure": figure, "what": n, "recipe": ours.get(n, 0), "plain": plain.get(n, 0)}
                for n in dict.fromkeys((*ours, *plain))
            ]
        return found


def forecast(
    source: str,
    name: str,
    recipe: Recipe,
    training: Training,
    machines: Machines,
    *,
    trust_remote_code: bool = False,
) -> Forecast:
    """Estimate what a training needs. Only the configuration of the model is read.

    Args:
        source: a directory with a ``config.json``, or the name of a model. A model without a head
            for language or classes gets one with two classes.
        name, recipe: the recipe.
        training: batch size, length, dtype and precision. Samples are cut to the longest that the
            model takes.
        machines: the GPUs, and the amount of data.
        trust_remote_code: run Python code that comes with a model.
    """
    _check_config(Path(source))
    loader = Loader("cpu", max_length=training.max_length, trust_remote_code=trust_remote_code)
    bare = loader.skeleton(source)
    head, longest = _head(bare), loader.ready(bare, None).limit
    remarks = []
    if longest < training.max_length and not takes_images(bare):
        remarks.append(
            f"Samples are cut to {longest:,} tokens, the most that the model takes: --max-length "
            f"is {training.max_length:,}."
        )
        training = replace(training, max_length=longest)
    if getattr(getattr(bare, "config", None), "quantization_config", None):
        remarks.append(
            f"The checkpoint is quantized. The sizes are those of a model with {training.dtype} "
            "weights."
        )

    def prepared(recipe: Recipe, training: Training = training) -> Prepared:
        return prepare(
            lambda: loader.skeleton(source, head), recipe, length=training.max_length,
            dtype=_DTYPES[training.dtype], is_half=training.precision != "float32",
        )  # fmt: skip

    found, standard, room = prepared(recipe), Recipe(), machines.memory
    needs = needs_of(found, training, machines)
    if found.recipe.trainable == standard.trainable:  # the same model, without θ*
        same = replace(found, recipe=standard, parts=replace(found.parts, anchors=0))
    else:
        same = prepared(standard)
    plain = needs_of(same, training, machines)
    if found.needs_old_data:
        remarks.append(
            "The recipe needs old data (--old-data). Its samples are trained on as well: an epoch "
            "has more updates than are counted here, and an update needs the same memory."
        )
    if found.refusal:
        remarks.append(f"A training would refuse this recipe: {found.refusal}.")
    changes = {}

    def helps(changed: Needs) -> bool:
        return changed.fit(room) or (
            needs.never_whole(room) and changed.bytes <= room < needs.bytes
        )

    if not needs.fit(room):
        for change, other, elsewhere in _changes(training, machines):
            if helps(changed := needs_of(found, other, elsewhere)):
                changes[change] = changed.bytes
        if found.recipe.trainable == standard.trainable:  # adapters need no copy of the model
            adapters = preset_that("keeps_base")
            with contextlib.suppress(ImportError, ValueError):  # not installed, or a conflict
                adapted = replace(found.recipe, trainable=Recipe.preset(adapters).trainable)
                if helps(changed := needs_of(prepared(adapted), training, machines)):
                    changes[f"--recipe {name}+{adapters}"] = changed.bytes
        if training.dtype == "float32":
            half = replace(training, dtype="bfloat16")
            in_half = prepared(found.recipe, half)
            for words, other in (
                ("", half),
                (" --gradient-checkpointing", replace(half, gradient_checkpointing=True)),
            ):
                if helps(changed := needs_of(in_half, other, machines)):
                    changes[f"--dtype bfloat16{words}"] = changed.bytes
                    break
    constants = measured()
    return Forecast(
        source,
        name,
        found.recipe.name,
        found.parts.count,
        found.parts.trained,
        _updates(training, machines),
        machines,
        {n: getattr(training, n) for n in TRAINING},
        needs,
        plain,
        needs.fit(machines.memory),
        changes,
        f"{constants['device']}, {constants['date']}",
        tuple(remarks),
    )


#: The settings of a training that change its needs.
TRAINING = (
    "batch_size", "accumulate", "max_length", "epochs", "max_updates", "precision", "dtype",
    "gradient_checkpointing",
)  # fmt: skip


def _value(training: Training) -> int:
    """Bytes of an activation on a GPU."""
    return 4 if training.precision == training.dtype == "float32" else 2


def _check_config(folder: Path) -> None:
    names = ("config.json", "adapter_config.json")
    if folder.is_dir() and not any((folder / name).is_file() for name in names):
        raise ValueError(
            f"{folder} has no config.json, from which plan reads the sizes of a model: pass the "
            "directory or the name of a model of transformers"
        )


def _head(model: nn.Module) -> NewHead | None:
    """A new head with two classes for a model without one that `holdfast finetune` trains."""
    if model_kind(model) in ("causal_lm", "classifier", "image_classifier"):
        return None
    return NewHead(("0", "1"), images=takes_images(model))


def _updates(training: Training, machines: Machines) -> int:
    size = training.batch_size * training.accumulate * machines.gpus
    return number_of_updates(machines.data_size, size, training.epochs, training.max_updates)


def needs_of(found: Prepared, training: Training, machines: Machines) -> Needs:
    """What a prepared training needs on some machines."""
    parts, passes = found.parts, found.passes
    samples = training.batch_size * training.accumulate * machines.gpus
    tokens = 1 if passes.is_image else training.max_length
    value = parts.gradients / max(1, parts.trained)
    anchor = value if machines.anchor_dtype is None else _DTYPES[machines.anchor_dtype].itemsize
    planned = Planned(
        value=value,
        anchor=anchor,
        data=machines.data_size,
        samples=samples,
        updates=_updates(training, machines),
        length=tokens,
        targets=training.max_length if found.is_token else 1,
        outputs=passes.outputs[-1],
        keeps_base=found.recipe.trainable.keeps_base,
    )
    costs = [method.cost(planned) for _, method in found.recipe]
    return Needs(
        memory=_rounded(_memory(found, training, machines, planned, costs)),
        on_cpu=_rounded(_on_cpu(found, machines, planned, costs)),
        update=_rounded(_update(found, training, machines, planned, costs)),
        before=_rounded(_before(found, machines, planned, costs)),
        whole=_rounded(_whole(found, machines, planned, costs)),
    )


def _memory(
    found: Prepared, training: Training, machines: Machines, planned: Planned, costs: list[Cost]
) -> dict[str, float]:
    parts, passes, ranks = found.parts, found.passes, machines.ranks
    memory = {"weights": parts.weights / ranks}
    for cost in costs:
        for name, size in cost.state.items():
            memory[name] = memory.get(name, 0) + size * parts.trained / ranks
    if machines.anchors == "device" or ranks > 1:
        memory["θ*"] = planned.anchor * parts.anchors / ranks
    for name, size in _whole(found, machines, planned, costs).items():
        if name != "weights":  # a run keeps what it made on the whole model
            memory[f"{name}, whole"] = size
    memory["frozen copy"] = _sum(costs, "copies") * parts.weights
    if ranks > 1:
        # FSDP2 gathers a block ahead of the one that runs. Gradients are whole until reduced.
        memory["gathered weights"] = _value(training) * (3 * parts.block + parts.outside)
    else:
        memory["cast weights"] = passes.kept_once
    beside = _sum(costs, "trained") / planned.samples / planned.length
    activations = _activations(found, training) * training.batch_size * (1 + beside)
    outputs = _outputs(found, training, machines, planned, costs)
    memory |= {"activations": activations, "outputs and loss": outputs}
    # The last micro-batch frees activations while gradients are made; earlier ones leave theirs.
    free = activations + outputs if training.accumulate == 1 else 0
    memory["gradients beyond activations"] = max(0, parts.gradients / ranks - free)
    return memory


def _whole(
    found: Prepared, machines: Machines, planned: Planned, costs: list[Cost]
) -> dict[str, float]:
    """Bytes on every GPU before the model is sharded; nothing if it is not."""
    if machines.ranks == 1:
        return {}
    whole = {"weights": float(found.parts.weights)}
    if machines.anchors == "device":
        whole["θ*"] = planned.anchor * found.parts.anchors
    each = math.fsum(cost.state.get("importance", 0.0) for cost in costs)
    return whole | {"importance": each * found.parts.trained}


def _outputs(
    found: Prepared, training: Training, machines: Machines, planned: Planned, costs: list[Cost]
) -> float:
    """Bytes of the outputs of a micro-batch and of their loss.

    With chunks of logits, the gradient of the output layer is there before the backward pass: a sum
    over chunks in at least float32 and that of a chunk, and another one of the data besides the
    target's.
    """
    passes = found.passes
    count = passes.outputs.numel() * training.batch_size
    if passes.head is None:
        return count * (_value(training) + _LOSS)
    value = planned.value if machines.ranks == 1 else _value(training)  # FSDP2 casts the weights
    gradient = value + (max(4, value) if count > LARGE_CHUNK else 0)
    gradient += value if _sum(costs, "trained") else 0
    return min(count, LARGE_CHUNK) * _CHUNKED + gradient * passes.head


def _activations(found: Prepared, training: Training) -> float:
    """Bytes of a sample. With checkpointing: the inputs of all blocks, and one whole block."""
    parts, kept = found.parts, found.passes.kept
    if not (training.gradient_checkpointing and parts.blocks and parts.width):
        return kept
    inputs = parts.blocks * training.max_length * parts.width * _value(training)
    return min(kept, inputs + kept / parts.blocks)


def _on_cpu(
    found: Prepared, machines: Machines, planned: Planned, costs: list[Cost]
) -> dict[str, float]:
    on_cpu = {"kept predictions": _sum(costs, "on_cpu")}
    if machines.anchors == "host" and machines.ranks == 1:  # sharded, it is mapped from its files
        on_cpu["θ*"] = planned.anchor * found.parts.anchors
    return on_cpu


def _update(
    found: Prepared, training: Training, machines: Machines, planned: Planned, costs: list[Cost]
) -> dict[str, float]:
    parts, passes, constants = found.parts, found.passes, measured()
    flops, bandwidth = _speeds(machines)
    share = planned.samples / machines.gpus  # samples per GPU
    again = constants["x_checkpointing"] if training.gradient_checkpointing else 1.0
    # A GPU computes, or it waits for the CPU to launch its kernels.
    launched = training.accumulate * _launching(found)
    target = again * max(share * passes.training / flops, launched)
    update = {"forward and backward": target}
    update["on other data"] = target * _sum(costs, "trained") / (planned.samples * planned.length)
    if predicted := _sum(costs, "predicted") / planned.length / machines.gpus:
        update["pretrained model's predictions"] = max(
            predicted * passes.forward / flops, constants["x_forward"] * launched
        )
    step = 0.0
    for cost in costs:
        limits = constants["x_limit"].get(cost.kernel)
        if limits is None:
            raise ValueError(
                f"a method of the recipe has the cost of a kernel {cost.kernel!r}, which was not "
                f"measured: it must be one of {', '.join(filter(None, constants['x_limit']))}, or "
                "empty for a step at the speed of memory"
            )
        limit = limits.get("bfloat16" if planned.value < 4 else "float32", limits["float32"])
        step += cost.moved * limit * parts.trained / machines.ranks / bandwidth
    update["optimizer step"] = step
    if machines.anchors == "host" and machines.ranks == 1 and parts.anchors:
        # Hidden behind the backward pass up to the measured rate.
        fetched, host = planned.anchor * parts.anchors, constants["host_anchors"]
        late = max(0.0, fetched / host["bytes_per_s"] - target)
        update["fetching θ*"] = late + (host["x_update"] - 1) * target
    return update


def _before(
    found: Prepared, machines: Machines, planned: Planned, costs: list[Cost]
) -> dict[str, float]:
    """Seconds on all GPUs together, in the time that the training takes them."""
    passes, constants, flops = found.passes, measured(), _speeds(machines)[0]
    scale = GPUS[_MEASURED][1] / GPUS[machines.gpu][1]
    drawn = constants["draw_s_per_token_and_weight"] * found.parts.count * scale
    predicted, trained = (_sum(costs, f"before_{work}") for work in ("predicted", "trained"))
    launched = _launching(found)
    return {
        "predictions": max(
            predicted / planned.length * passes.forward / flops,
            predicted / TOKENS * constants["x_forward"] * launched,
        ) / machines.gpus,
        "gradients of samples": trained / planned.length * max(
            passes.training / flops, launched / _SAMPLES_BEFORE
        ),
        "drawing texts": _sum(costs, "before_drawn") * drawn / machines.gpus,
    }  # fmt: skip


def _launching(found: Prepared) -> float:
    """Seconds in which the CPU launches the kernels of a forward and a backward pass."""
    kind = "adapters" if found.recipe.trainable.keeps_base else "weights"
    each: float = measured()["launch_s_per_layer"][kind]
    return each * max(1, found.parts.blocks)


def _speeds(machines: Machines) -> tuple[float, float]:
    """Operations and bytes per second: as measured, in proportion to the data sheets."""
    constants, (_, bandwidth, flops) = measured(), GPUS[machines.gpu]
    _, of_bandwidth, of_flops = GPUS[_MEASURED]
    return (
        constants["flops"] * flops / of_flops,
        constants["bandwidth"] * bandwidth / of_bandwidth,
    )


def _changes(training: Training, machines: Machines) -> Iterator[tuple[str, Training, Machines]]:
    """Other settings, from those that cost the least."""
    smaller = replace(training, batch_size=1, accumulate=training.accumulate * training.batch_size)
    if not training.gradient_checkpointing:
        again = replace(training, gradient_checkpointing=True)
        yield "--gradient-checkpointing", again, machines
    if training.batch_size > 1:
        words = f"--batch-size 1 --accumulate {smaller.accumulate}"
        yield words, smaller, machines
        if not training.gradient_checkpointing:
            both = replace(smaller, gradient_checkpointing=True)
            yield f"{words} --gradient-checkpointing", both, machines
    if machines.gpus > 1 and not machines.shard:
        yield "--shard", training, replace(machines, shard=True)
    if machines.anchors == "device":
        elsewhere = replace(machines, anchors="host")
        yield "--anchors host, in Python: reference=Reference.open(DIR)", training, elsewhere
    if machines.shard:
        for times in (2, 4, 8, 16):
            more = replace(machines, gpus=machines.gpus * times)
            yield f"--gpus {more.gpus}", training, more


def _sum(costs: list[Cost], name: str) -> float:
    return math.fsum(getattr(cost, name) for cost in costs)


def _rounded(values: dict[str, float]) -> dict[str, float]:
    """What is needed, with as many digits as a float32 has."""
    return {name: float(f"{value:.7g}") for name, value in values.items() if value > 0}
