"""The loss of a language model, and its divergence from a teacher, without the logits of a batch.

The output layer computes the logits of a chunk of positions at a time, and their gradient at once,
so that a chunk's logits are freed before the next chunk.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from holdfast._torch.dtypes import wide, widen
from holdfast._torch.head_tap import Head, at_head
from holdfast._torch.layout import is_sharded
from holdfast._torch.lm_head import LARGE_CHUNK
from holdfast._torch.ride import riding
from holdfast._torch.teachers import AllTokens, Teacher

Chunks = Iterator[tuple[slice, Tensor]]  # rows, and their logits in at least float32


class RowLoss:
    """A sum over rows of logits, of which a chunk is known at a time.

    Attributes:
        parts: into how many parts a chunk is divided, if the loss needs much memory for it.
    """

    parts: int = 1

    def look(self, chunks: Chunks) -> None:
        """Called first. Chunks are computed when they are read, without gradients."""

    def at(self, part: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """The sum over a part of the rows, and a function for its gradient, called at most once.

        ``logits`` are in at least float32, without a gradient; the gradient is with respect to
        them.
        """
        raise NotImplementedError(f"{type(self).__name__} has no sum over rows of logits")


def loss_at_head(
    model: nn.Module,
    inputs: Any,
    shape: torch.Size,
    rows: Tensor,
    loss: RowLoss,
    *,
    chunk: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The sum of a loss over rows of a model's logits, and the model's auxiliary loss, if any.

    Args:
        model: a causal language model, wrapped or not.
        inputs: the arguments of the model. Labels are left out.
        shape: that of the inputs, batch × length.
        rows: indices in the flattened batch.
        loss: a scalar in float32, or in float64 for a float64 model. It can be differentiated once.
            If gradients are disabled, none are computed.
        chunk: the number of logits that are computed at a time; by default 256 MB of them, divided
            by ``loss.parts``.
    """
    return at_head(model, inputs, shape, rows, _InChunks(loss, chunk))


def replay_divergence(
    model: nn.Module,
    inputs: Mapping[str, Any],
    where: Tensor,
    teacher: Teacher,
    *,
    weights: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Σ over chosen positions of the divergence of a model's predictions from a teacher's.

    Args:
        model: a causal language model, wrapped or not.
        inputs: the arguments of the model. Labels are left out.
        where: a mask, batch × length, of the positions whose logits count. The logits at position
            t predict the token at t + 1. A mask on the CPU saves a synchronization of the device.
        teacher: the predictions of the pretrained model at these positions, in their order in the
            flattened batch.
        weights: one weight per chosen position.
        chunk: as for :func:`loss_at_head`.

    Example:
        >>> from transformers import GPT2Config, GPT2LMHeadModel
        >>> config = GPT2Config(n_embd=4, n_head=1, vocab_size=9, bos_token_id=0, eos_token_id=0)
        >>> model = GPT2LMHeadModel(config).eval()
        >>> x, where = {"input_ids": torch.tensor([[0, 3, 5]])}, torch.ones(1, 3, dtype=torch.bool)
        >>> teacher = teacher_of(model, x, where)
        >>> replay_divergence(model, x, where, teacher).item()
        0.0
    """
    rows, loss = _checked(where, teacher, weights, chunk)
    return at_head(model, inputs, where.shape, rows, loss)[0]


def divergence_of(logits: Tensor, teacher: Teacher) -> Tensor:
    """Σ of the divergence of rows of logits from a teacher's predictions.

    Example:
        >>> logits = torch.tensor([[1.0, 2.0], [0.5, 0.5]])
        >>> divergence_of(logits + 3, AllTokens(logits)).item()
        0.0
    """
    return _InChunks(_Divergence(teacher, None), None)(logits, None)


@contextlib.contextmanager
def divergence_beside(
    model: nn.Module,
    inputs: Mapping[str, Any],
    where: Tensor,
    teacher: Teacher,
    *,
    weights: Tensor | None = None,
    chunk: int | None = None,
) -> Iterator[Callable[[], Tensor]]:
    """:func:`replay_divergence` as part of another call of the model, made within the context.

    The arguments are the same. The context yields a function that returns the divergence. It calls
    the model itself if no other call could take the inputs along.
    """
    rows, loss = _checked(where, teacher, weights, chunk)
    with riding(model, inputs, rows, loss) as end:

        def divergence() -> Tensor:
            found = end()
            return at_head(model, inputs, where.shape, rows, loss)[0] if found is None else found

        yield divergence


def _checked(
    where: Tensor, teacher: Teacher, weights: Tensor | None, chunk: int | None
) -> tuple[Tensor, "_InChunks"]:
    """The chosen positions, and their loss."""
    rows = where.flatten().nonzero().squeeze(1)
    for name, values in (("the teacher", teacher), ("weights", weights)):
        if values is not None and len(values) != len(rows):
            raise ValueError(
                f"{name} must have one entry per chosen position: there are {len(rows)} positions "
                f"and {len(values)} entries"
            )
    return rows, _InChunks(_Divergence(teacher, weights), chunk)


def teacher_of(model: nn.Module, inputs: Mapping[str, Any], where: Tensor) -> AllTokens:
    """The predictions of a pretrained model at chosen positions, or of one with its adapters off.

    The teacher has the hidden states. It has the logits instead where the output layer cannot map
    states to logits later, because it has adapters or its weights are sharded between two calls.
    """
    states_suffice = not any(is_sharded(p) or hasattr(p, "ds_id") for p in model.parameters())
    kept: list[AllTokens] = []

    def keep(states: Tensor, head: Head | None) -> Tensor:
        if head is None:
            kept.append(AllTokens(states))
        elif states_suffice and not hasattr(head.layer, "disable_adapters"):  # PEFT's layers
            kept.append(AllTokens(states, _in_this_precision(head, states.device.type)))
        else:
            kept.append(AllTokens(head(states)))
        return states.new_zeros(())

    with torch.no_grad():
        at_head(model, inputs, where.shape, where.flatten().nonzero().squeeze(1), keep)
    return kept[-1]


def _in_this_precision(head: Head, kind: str) -> Callable[[Tensor], Tensor]:
    """A head that runs later as it would run now, with or without autocast."""
    enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)

    def logits(states: Tensor) -> Tensor:
        with torch.autocast(kind, dtype, enabled):
            return head(states)

    return logits


@dataclass(frozen=True)
class _Divergence(RowLoss):
    """Σ of the divergence from a teacher."""

    teacher: Teacher
    weights: Tensor | None

    def at(self, part: slice, logits: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        values, gradient = self.teacher.compare(part, logits)
        if self.weights is None:
            return values.sum(), gradient
        weights = self.weights[part].to(values, non_blocking=True)
        return (values * weights).sum(), lambda: gradient().mul_(weights[:, None])


@dataclass(frozen=True)
class _InChunks:
    """The sum of a loss over rows of hidden states, or of logits if there is no head."""

    loss: RowLoss
    chunk: int | None

    def __call__(self, states: Tensor, head: Head | None) -> Tensor:
        trained = {} if head is None else head.trained()
        if head is not None and trained is None:
            states, head = head(states), None
        self.loss.look(self.chunks(states.detach(), head))
        if torch.is_grad_enabled():
            named = trained or {}
            apply: Any = _Sum.apply
            return cast(Tensor, apply(self, head, tuple(named), states, *named.values()))
        total = _zero(states)
        for part, logits in self.chunks(states, head):
            total += self.loss.at(part, logits)[0].to(total.device)
        return total

    def parts(self, states: Tensor, head: Head | None) -> Iterator[slice]:
        """Slices of the rows. There is always one, so that all trained tensors get a gradient."""
        vocabulary = states.shape[-1] if head is None else head.vocabulary
        rows = max(1, (self.chunk or LARGE_CHUNK // self.loss.parts) // vocabulary)
        for start in range(0, max(1, len(states)), rows):
            yield slice(start, start + rows)

    def chunks(self, states: Tensor, head: Head | None) -> Chunks:
        """All logits, without gradients."""
        for part in self.parts(states, head):
            with torch.no_grad():
                yield part, widen(states[part] if head is None else head(states[part]))


class _Sum(torch.autograd.Function):
    """The sum of a loss, with its gradients for the states and the parameters of the head."""

    @staticmethod
    def forward(
        ctx: Any, job: _InChunks, head: Head | None, names: Sequence[str], *inputs: Tensor
    ) -> Tensor:
        states, *trained = inputs
        wanted = ctx.needs_input_grad[3]
        # Other leaves, because tensor hooks of the parameters belong to the backward pass.
        leaves = [p.detach().requires_grad_() for p in trained]
        named = dict(zip(names, leaves, strict=True))
        of_states = torch.empty_like(states) if wanted else None
        total = _zero(states)
        sums: list[Tensor | None] = [None] * len(leaves)
        for part in job.parts(states, head):
            some = states[part].detach().requires_grad_(wanted)
            value = _with_gradients(job.loss, part, head, named, some)
            total += value.to(total.device)  # the head may be on another device
            if of_states is not None:
                of_states[part] = cast(Tensor, some.grad)
            sums = [_added(s, leaf) for s, leaf in zip(sums, leaves, strict=True)]
        rounded = (s if s is None else s.to(p.dtype) for s, p in zip(sums, leaves, strict=True))
        ctx.save_for_backward(of_states, *rounded)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # In place, because the gradient of an output layer is large.
        scaled = (g if g is None else g.mul_(gradient.to(g.device)) for g in ctx.saved_tensors)
        return (None, None, None, *scaled)


def _with_gradients(
    loss: RowLoss, part: slice, head: Head | None, named: Mapping[str, Tensor], some: Tensor
) -> Tensor:
    """The loss of a chunk, whose gradients are added to those of its states and the parameters.

    A function of its own, so that the logits are freed before the next chunk.
    """
    with torch.enable_grad():
        logits = some if head is None else head.call(named, some)
    value, gradient = loss.at(part, widen(logits.detach()))
    if logits.requires_grad:
        logits.backward(gradient().to(logits.dtype))
    return value


def _added(total: Tensor | None, leaf: Tensor) -> Tensor | None:
    """A sum over chunks with the gradient of the next one, which is taken from its leaf.

    It is at least float32: a sum in half precision would lose more with every chunk.
    """
    gradient, leaf.grad = leaf.grad, None
    if total is None or gradient is None:
        return gradient if total is None else total
    return widen(total).add_(gradient)


def _zero(states: Tensor) -> Tensor:
    return states.new_zeros((), dtype=wide(states))
