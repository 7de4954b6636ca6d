"""The worker processes of a plan: how many work side by side, and on which GPU.

One process cannot keep a GPU busy with a small model: most of the time, the GPU waits for the next
kernel. Several runs on one GPU use this time. Their number depends on the memory that a run needs:
first by an estimate, then by the peaks of finished runs. If memory runs out all the same, the
number is lowered for the rest of the plan.
"""

import contextlib
import os
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from holdfast._torch.checks import whole_number
from holdfast._torch.head_tap import output_layer
from holdfast._torch.lm_head import LARGE_CHUNK
from holdfast.comparison.gpus import Gpu, gpus_for
from holdfast.comparison.inputs import training_data
from holdfast.comparison.plan import Plan
from holdfast.io.heads import model_kind

#: Runs at a time on each GPU, or a choice by the model, the memory and the cores.
PerGpu = int | Literal["auto"]

#: Parameters of the largest model that shares a GPU: larger ones keep it busy alone.
SMALL = 1_000_000_000
#: The most runs on one GPU: with more of them, each only takes longer.
MOST = 5
#: CPU cores per run on a GPU: one launches kernels, the other makes batches.
CORES = 2
#: Bytes that a process takes on a GPU besides its tensors, for the driver and libraries.
CONTEXT = 1 << 30
#: The memory that a process takes as a multiple of its tensors: the allocator leaves gaps.
GAPS = 1.2
#: Bytes per parameter at most: weights, gradients, two moments, θ*, importance, the base in tests.
PER_PARAMETER = 28
#: Bytes of activations per token and unit of a layer.
PER_UNIT = 100
#: Bytes per logit of those that are computed at a time.
PER_LOGIT = 16
#: Bytes per weight of the output layer: the gradients of a chunk of logits, and of a recall's.
PER_OUTPUT = 8


def most_per_gpu(parameters: int | None, cores: int) -> int:
    """The most runs at a time on a GPU, whatever its memory; one if the model is not known.

    ``cores`` are those of the CPU for this GPU.

    >>> most_per_gpu(135_000_000, cores=16), most_per_gpu(135_000_000, cores=6)
    (5, 3)
    >>> most_per_gpu(7_000_000_000, cores=16)
    1
    """
    if parameters is None or parameters > SMALL:
        return 1
    return max(1, min(MOST, cores // CORES))


def measured_need(peak: int) -> int:
    """The bytes that a run takes on a GPU if its tensors took at most ``peak``."""
    return int(GAPS * peak) + CONTEXT


def estimated_need(
    parameters: int, tokens: int, layers: int, hidden: int, logits: int, head: int = 0
) -> int:
    """About the most bytes that a run takes on a GPU.

    Args:
        parameters: size of the model.
        tokens: size of a micro-batch.
        layers, hidden: the number of layers, and of units in each.
        logits: the number of logits that are computed at a time.
        head: size of the output layer.
    """
    outputs = PER_LOGIT * logits + PER_OUTPUT * head
    return PER_PARAMETER * parameters + PER_UNIT * tokens * layers * hidden + outputs + CONTEXT


class Crew:
    """The worker processes of a plan on this machine.

    Attributes:
        workers: the GPU of each worker process, by torch's index; None for the CPU.
        most: the most runs at a time on each GPU.
        free: if memory limits their number further, the free bytes of each GPU.
        need: bytes that a run takes on a GPU; if None, the first runs are alone there.
    """

    def __init__(
        self,
        workers: Sequence[int | None],
        most: Mapping[int, int],
        free: Mapping[int, int] | None = None,
        need: int | None = None,
    ) -> None:
        self.workers, self.most, self.free, self.need = [*workers], {**most}, free, need
        self.peak = 0

    def limit(self, gpu: int) -> int:
        """The number of runs at a time on a GPU, as far as is known now."""
        if self.free is None:
            return self.most[gpu]
        return max(1, min(self.most[gpu], self.free[gpu] // self.need if self.need else 1))

    def admits(self, gpu: int | None, running: int) -> bool:
        """Whether another run may start where so many are running."""
        return gpu is None or running < self.limit(gpu)

    def learn(self, peak: int) -> None:
        """Raise the need to that of a finished run. Other recipes may need more than it did."""
        self.peak = max(self.peak, peak)
        self.need = max(self.need or 0, measured_need(self.peak))

    def lower(self, gpu: int | None, at_a_time: int, error: str) -> None:
        """Put fewer runs on a GPU if so many did not fit; other errors say nothing about it."""
        if gpu is not None and "out of memory" in error:
            self.most[gpu] = max(1, min(self.most[gpu], at_a_time - 1))

    @property
    def alone(self) -> list[int | None]:
        """Some of the workers: one per GPU, or one for the CPU."""
        return [*dict.fromkeys(self.workers)]

    @property
    def at_a_time(self) -> int:
        """The number of runs at a time, as far as is known now."""
        count = Counter(self.workers)
        return sum(n if gpu is None else min(n, self.limit(gpu)) for gpu, n in count.items())


def make_crew(
    gpus: Sequence[Gpu],
    *,
    jobs: int | None = None,
    per_gpu: PerGpu = "auto",
    parameters: int | None = None,
    need: int | None = None,
    cores: int | None = None,
) -> Crew:
    """Decide how many workers there are, and where.

    Args:
        gpus: the GPUs for the runs; none if they go on the CPU.
        jobs: the most runs at a time; by default one per core of the CPU.
        per_gpu: the most runs at a time on each GPU; ``"auto"`` fits ``jobs``, or chooses.
        parameters: size of the model; None if it is not known.
        need: an estimate of the bytes that a run takes on a GPU; None if there is none.
        cores: the cores of the CPU.

    >>> make_crew([Gpu(0), Gpu(1)], jobs=3).workers
    [0, 1, 0]
    >>> make_crew([], cores=2).workers
    [None, None]
    """
    cores = cores or os.cpu_count() or 1
    if not gpus:
        return Crew([None] * (jobs or cores), {})
    most = per_gpu if per_gpu != "auto" else most_per_gpu(parameters, cores // len(gpus))
    if jobs is not None and per_gpu == "auto":
        most = -(-jobs // len(gpus))
    workers = [gpu.index for _ in range(most) for gpu in gpus][:jobs]
    chooses = jobs is None and per_gpu == "auto"
    free = {gpu.index: gpu.free for gpu in gpus} if chooses else None
    return Crew(workers, {gpu.index: most for gpu in gpus}, free, need)


def crew_for(plan: Plan, jobs: int | None, per_gpu: PerGpu, *, works: bool = True) -> Crew:
    """The crew of a plan; reads the model's configuration if there is a choice to make.

    ``works`` is False if no run is left for it.
    """
    if jobs is not None:
        whole_number("jobs", jobs, 1)
    if per_gpu != "auto":
        whole_number("per_gpu", per_gpu, 1)
    gpus = gpus_for(plan.device)
    if not (gpus or plan.device is None or plan.device.startswith(("cpu", "cuda"))):
        jobs = jobs or 1  # the memory of devices such as xpu is not known
    if works and per_gpu != "auto" and not gpus:
        warnings.warn(
            f"per_gpu={per_gpu} (--per-gpu) has no effect, because the runs use no CUDA GPU: set "
            "jobs (--jobs), the number of runs at a time",
            stacklevel=2,
        )
    parameters, need = None, None
    if works and jobs is None and per_gpu == "auto" and any(gpu.free for gpu in gpus):
        # The runs themselves say what is wrong with the model.
        with contextlib.suppress(ImportError, OSError, RuntimeError, TypeError, ValueError):
            parameters, need = _size_of(plan)
    return make_crew(gpus, jobs=jobs, per_gpu=per_gpu, parameters=parameters, need=need)


def _size_of(plan: Plan) -> tuple[int, int | None]:
    """The parameters of the model, and about the bytes that a run needs."""
    data = training_data(plan)
    model: Any = data.loader.skeleton(data.source, data.head)
    parameters = sum(tensor.numel() for tensor in model.parameters())
    config = model.config.get_text_config()
    layers, hidden = (getattr(config, name, 0) for name in ("num_hidden_layers", "hidden_size"))
    if not layers or not hidden:
        return parameters, None
    tokens = max(spec.training.batch_size * spec.training.max_length for spec in plan.runs)
    logits, head = tokens * getattr(config, "vocab_size", 0), output_layer(model)
    if head is not None or model_kind(model) != "causal_lm":
        logits = min(logits, LARGE_CHUNK)  # in training, and in the tests of any model
    outputs = 0 if head is None else sum(tensor.numel() for tensor in head.parameters())
    return parameters, estimated_need(parameters, tokens, layers, hidden, logits, outputs)
