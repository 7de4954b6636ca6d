"""The importance of each coordinate: a mean over samples of a function of their gradients."""

import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.data import Subset

from holdfast._torch import batch
from holdfast._torch.checks import positive_integer
from holdfast._torch.dtypes import wide
from holdfast._torch.lm_head import is_out_of_memory
from holdfast._torch.progress import progress_bar
from holdfast.data import Collate, IndexedSource, Source, StreamSource, as_source
from holdfast.reference import Reference
from holdfast.stages import Planned, Run

_BYTES = 1 << 30  # of per-sample gradients at a time


def tokens_read(samples: int | None, planned: Planned) -> int:
    """The tokens on which an importance is measured; all of the data if ``samples`` is None."""
    some = planned.data if samples is None else min(samples, planned.data)
    return some * planned.length


def mean_over_samples(
    model: nn.Module,
    data: Any,
    collate: Collate | None,
    batch_size: int,
    relabel: Callable[[Any, Tensor], Tensor],
    scalar: Callable[[Tensor, Tensor], Tensor],
    transform: Callable[[Tensor], Tensor],
    *,
    samples: int | None,
    seed: int,
    normalize: bool,
    progress: bool,
) -> Reference:
    """E[transform(∂ scalar(logits, labels)/∂θ)] over the samples, by parameter name.

    Parameters that require no gradient are skipped, so a frozen or quantized base costs nothing.
    ``relabel`` returns the labels of a batch of inputs. ``scalar`` gets a batch of one sample.
    """
    check_samples("samples", samples)
    live = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not live:
        raise ValueError(
            f"no parameter of {type(model).__name__} requires a gradient, so there is no "
            "importance to measure"
        )
    parameters = {name: p.detach() for name, p in live.items()}
    buffers = dict(model.named_buffers())
    totals = {name: torch.zeros_like(p, dtype=wide(p)) for name, p in parameters.items()}
    device = next(iter(parameters.values())).device
    source = drawn(as_source(data, collate, batch_size, batch.pad_id_of(model)), samples, seed)

    def of_one(weights: dict[str, Tensor], inputs: Any, labels: Tensor) -> Tensor:
        if isinstance(inputs, Mapping):
            one = {name: t.unsqueeze(0) for name, t in inputs.items()}
            outputs = functional_call(model, (weights, buffers), kwargs=one)
        else:
            outputs = functional_call(model, (weights, buffers), inputs.unsqueeze(0))
        logits = outputs if isinstance(outputs, Tensor) else outputs.logits
        return scalar(logits, labels.unsqueeze(0))

    def one_by_one(inputs: Any, labels: Tensor) -> None:
        for i in range(size := len(labels)):
            with torch.enable_grad():
                one = batch.take(inputs, slice(i, i + 1), size)
                value = scalar(batch.logits_of(model, one), labels[i : i + 1])
            gradients = torch.autograd.grad(value, list(live.values()), allow_unused=True)
            for total, g in zip(totals.values(), gradients, strict=True):
                if g is not None:
                    total += transform(g.to(total.dtype))

    together = vmap(grad(of_one), (None, 0, 0), randomness="different")
    rows, count = samples_at_a_time(totals.values()), 0
    bar = progress_bar(source.total, "importance", shown=progress)
    with bar, batch.evaluating(model), warnings.catch_warnings():
        # torch.func warns about kernels that it loops over: correct, but slower.
        warnings.filterwarnings("ignore", "There is a performance drop")
        for indices, read in source:
            inputs, labels = batch.inputs_and_labels(model, batch.to_device(read(), device))
            labels = relabel(inputs, labels)
            start, size = 0, batch.batch_length((inputs, labels))
            while start < size:
                part = slice(start, start + rows)
                some, wanted = batch.take(inputs, part, size), labels[part]
                if rows == 1:  # the same, without the overhead of torch.func
                    one_by_one(some, wanted)
                else:
                    try:
                        gradients = together(parameters, some, wanted)
                    except RuntimeError as error:
                        # Other errors: the model cannot be mapped over samples, because it
                        # branches on data or has its own kernels, as quantized layers do.
                        rows = max(1, len(wanted) // 2) if is_out_of_memory(error) else 1
                        continue
                    for name, g in gradients.items():
                        totals[name] += transform(g.to(totals[name].dtype)).sum(0)
                start += len(wanted)
            count += size
            bar.update(len(indices))
    if not count:
        raise ValueError("importance cannot be measured: the data is empty")
    found = {name: total / count for name, total in totals.items()}
    if not all(bool(f.isfinite().all()) for f in found.values()):
        raise ValueError("the importance is not finite: check the data and the model's dtype")
    return Reference(mean_one(found) if normalize else found).bind(model)


def measured(
    run: Run, normalize: bool, take: Callable[..., Reference], **options: Any
) -> Reference | None:
    """The importance of the parameters that a run pulls to θ*; ``take`` measures it.

    Parameters without an anchor are left out before scaling to a mean of 1: the gradients of a new
    head are far larger than those of the body, and would shrink all others.
    """
    if run.anchors is None:
        return None
    found = take(
        run.model, run.data, collate=run.collate, seed=run.seed, progress=run.progress, **options
    )
    parameters = dict(run.model.named_parameters())
    anchors = run.anchors.match([parameters[name] for name in found], list(found))
    kept = {n: f for (n, f), a in zip(found.items(), anchors, strict=True) if a is not None}
    if not kept:
        return None
    return Reference(mean_one(kept) if normalize else kept).bind(run.model)


def mean_one(importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    total = sum(float(f.sum(dtype=torch.float64)) for f in importance.values())
    mean = total / sum(f.numel() for f in importance.values())
    if mean == 0:
        raise ValueError("the importance is 0 everywhere: it cannot be scaled to a mean of 1")
    return {name: f / mean for name, f in importance.items()}


def drawn(source: Source, samples: int | None, seed: int) -> Source:
    """Draw samples without replacement; a source that cannot be indexed is used whole."""
    if samples is None or isinstance(source, StreamSource) or len(source.data) <= samples:
        return source
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(source.data), generator=generator)[:samples].sort().values.tolist()
    select = getattr(source.data, "select", None)  # datasets.Dataset: stays one
    some = Subset(source.data, chosen) if select is None else select(chosen)
    return IndexedSource(some, source.collate, source.batch_size)


def samples_at_a_time(totals: Iterable[Tensor]) -> int:
    """The number of samples whose gradients are held in memory together.

    It depends on the machine, but not on its free memory: a resumed run measures the importance
    again and must find the same bits. (If memory runs out, fewer are held and sums are rounded in
    another order.)
    """
    some = list(totals)
    room = _BYTES
    if some[0].device.type == "cuda":
        room = max(room, torch.cuda.get_device_properties(some[0].device).total_memory // 16)
    return max(1, room // sum(t.nbytes for t in some))


def check_samples(name: str, samples: Any) -> int | None:
    """Check a number of samples; None stands for all."""
    return None if samples is None else positive_integer(name, samples)
