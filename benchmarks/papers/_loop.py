"""A recipe at work with its forward and backward pass replayed as CUDA graphs.

Small models on a large GPU wait for the host to launch their kernels. Here a batch's gradient is
one launch: captured once for every shape of batch, replayed ever after. All the rest is the
library's own: :class:`holdfast.run.Run` prepares the model, scores the data, makes the optimizer
and merges. On a CPU the same is done without graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.run import Run

Batch = dict[str, Tensor]
Loss = Callable[[Batch], Tensor]


class Gradient:
    """Leaves the gradient of a batch's loss in ``.grad``, and returns the loss.

    Args:
        loss: of a batch, on the device; what it reads besides must stay where it is.
        parameters: what gets a gradient.
        buffers: what the loss changes by the way, such as BatchNorm's statistics.
        clip_norm: clip the gradient's norm to this.
        autocast: run the model in this dtype.
        graphs: whether the loss never waits for the GPU, so that a CUDA graph can hold it.
    """

    def __init__(
        self,
        loss: Loss,
        parameters: Iterable[nn.Parameter],
        buffers: Iterable[Tensor] = (),
        *,
        clip_norm: float | None = None,
        autocast: torch.dtype | None = torch.bfloat16,
        graphs: bool = True,
    ) -> None:
        self.loss, self.clip_norm, self.autocast = loss, clip_norm, autocast
        self.use_graphs = graphs
        self.parameters = list(parameters)
        self.buffers, self.device = list(buffers), self.parameters[0].device
        self.graphs: dict[Any, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}
        self.pool: Any = None

    def __call__(self, batch: Batch) -> Tensor:
        if self.device.type != "cuda" or not self.use_graphs:
            return self._compute(batch)
        shapes = tuple((name, tuple(value.shape)) for name, value in batch.items())
        if shapes not in self.graphs:
            self.graphs[shapes] = self._capture(batch)
        graph, static, loss = self.graphs[shapes]
        for name, value in batch.items():
            static[name].copy_(value, non_blocking=True)
        graph.replay()
        return loss

    def _compute(self, batch: Batch) -> Tensor:
        trained = [p for p in self.parameters if p.requires_grad]  # these may become more
        for p in trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        torch._foreach_zero_([p.grad for p in trained if p.grad is not None])
        with torch.autocast(
            self.device.type, self.autocast, enabled=self.autocast is not None, cache_enabled=False
        ):
            loss = self.loss(batch)
        loss.backward()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(trained, self.clip_norm, foreach=True)
        return loss.detach()

    def _capture(self, batch: Batch) -> tuple[torch.cuda.CUDAGraph, Batch, Tensor]:
        static = {name: value.to(self.device).clone() for name, value in batch.items()}
        before = [buffer.clone() for buffer in self.buffers]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # once by the way, as capturing wants it
            self._compute(static)
        torch.cuda.current_stream().wait_stream(stream)
        for buffer, value in zip(self.buffers, before, strict=True):
            buffer.copy_(value)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            loss = self._compute(static)
        self.pool = self.pool or graph.pool()
        return graph, static, loss


def train(
    run: Run,
    batches: Iterable[Batch],
    loss: Loss,
    factors: Sequence[float],
    *,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = torch.bfloat16,
    graphs: bool = True,
    before_step: Callable[[int], None] | None = None,
    after_step: Callable[[int, Tensor], None] | None = None,
) -> None:
    """Make one update of ``run.model`` a batch.

    Args:
        run: with its data prepared.
        batches: one for each update, on any device.
        loss: the run's, of a batch.
        factors: of the learning rate, one for each update.
        clip_norm, autocast, graphs: see :class:`Gradient`.
        before_step, after_step: called with the update, counted from 1, and its loss.
    """
    run.model.train()
    optimizer = run.make_optimizer(len(factors))
    peaks = [group["lr"] for group in optimizer.param_groups]
    gradient = Gradient(
        loss, run.model.parameters(), run.model.buffers(), clip_norm=clip_norm, autocast=autocast,
        graphs=graphs,
    )  # fmt: skip
    for update, (batch, factor) in enumerate(zip(batches, factors, strict=True), 1):
        run.advance(update)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        value = gradient(batch)
        run.observe(value)
        if before_step is not None:
            before_step(update)
        optimizer.step()
        if after_step is not None:
            after_step(update, value)


def counted(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches with the number of their update, from 1: a tensor, which a graph reads each time."""
    update = torch.zeros((), dtype=torch.long, device=device)
    for batch in batches:
        update = update + 1  # on the device: nothing waits
        yield {**batch, "update": update}


class Distance:
    """‖θ − θ*‖ over what is pretrained, without waiting for the GPU."""

    def __init__(self, model: nn.Module, new: str = "classifier") -> None:
        kept = [p for name, p in model.named_parameters() if not name.startswith(new)]
        self.now = [p.detach() for p in kept]
        self.then = [p.detach().clone() for p in kept]

    def __call__(self) -> Tensor:
        gone = torch._foreach_sub(self.now, self.then)
        distance: Tensor = torch.stack(torch._foreach_norm(gone)).norm()
        return distance
