"""A causal language model as body and head, to compute the logits of chosen positions only.

Logits are the largest tensors of a language model, and those of most positions are not needed.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import without_peft
from holdfast._torch.batch import logits_of
from holdfast._torch.layout import is_sharded

Head = Callable[[Tensor], Tensor]
CHUNK = 1 << 24  # float32 logits per chunk: 64 MB
#: On a GPU, and in training, where each chunk adds to the gradient of the whole output layer.
LARGE_CHUNK = 4 * CHUNK


def rows_per_chunk(vocabulary: int, device: torch.device) -> int:
    """Positions whose logits are computed at a time, without gradients."""
    return max(1, (CHUNK if device.type == "cpu" else LARGE_CHUNK) // vocabulary)


@dataclass(frozen=True)
class Predictions:
    """The predictions of a model at every position of a batch.

    Attributes:
        states: hidden states, batch × length × width; for a classifier batch × width.
        head: maps states to logits; None if the states are logits.
        vocabulary: the number of logits per position.
    """

    states: Tensor
    head: Head | None
    vocabulary: int

    def logits(self, where: Tensor, targets: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the float32 logits of chosen positions in chunks, with their targets.

        ``where`` is a mask of the positions, or their indices in the flattened batch.
        """
        device = self.states.device
        states = self.states.flatten(0, -2)[where.flatten().to(device, non_blocking=True)]
        rows = rows_per_chunk(self.vocabulary, device)
        targets = targets.to(device, non_blocking=True)
        for some, wanted in zip(states.split(rows), targets.split(rows), strict=True):
            logits = self._logits(some)
            yield logits, wanted.to(logits.device)

    def nll(self, where: Tensor, targets: Tensor) -> Tensor:
        pairs = self.logits(where, targets)
        return torch.cat([F.cross_entropy(*pair, reduction="none") for pair in pairs])

    def log_probs(self) -> Tensor:
        """The log-probabilities of all tokens at every position."""
        return self._logits(self.states).log_softmax(-1)

    def _logits(self, states: Tensor) -> Tensor:
        return (states if self.head is None else self.head(states)).float()


def predict(model: nn.Module, inputs: Any) -> Predictions:
    logits = logits_of(model, inputs)
    return Predictions(logits, None, logits.shape[-1])


class Split:
    """A causal model that runs its head only at chosen positions, if the logits are its output.

    The first batch decides: a few of its positions are computed both ways and compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.found: tuple[nn.Module, Head] | None = None
        self.vocabulary = 1 << 16  # until the first batch
        self.looked = False

    def __call__(self, inputs: Any) -> Predictions:
        self.look(inputs)
        if self.found is None:
            return predict(self.model, inputs)
        return self.predictions(_hidden_states(self.found[0], inputs))

    def predictions(self, states: Tensor) -> Predictions:
        """The predictions from hidden states of the body."""
        return Predictions(states, None if self.found is None else self.found[1], self.vocabulary)

    def look(self, inputs: Any) -> bool:
        """Whether logits can be computed for chosen positions only."""
        if self.looked or not isinstance(inputs, dict):
            return self.found is not None
        few = {k: v[:1, :16] if v.dim() > 1 else v[:1] for k, v in inputs.items()}
        try:
            theirs = logits_of(self.model, few).float()
            self.vocabulary = theirs.shape[-1]
            body, head = _body_and_head(self.model)
            ours = head(_hidden_states(body, few))
            tolerance = 1e-5 if ours.dtype.itemsize >= 4 else 1e-2
            if (ours.float() - theirs).norm() / theirs.norm() <= tolerance:  # False if all are 0
                self.found = body, head
        except (torch.OutOfMemoryError, RuntimeError, TypeError, ValueError, AttributeError) as e:
            if is_out_of_memory(e):
                raise
        self.looked = True
        return self.found is not None


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def _body_and_head(model: nn.Module) -> tuple[nn.Module, Head]:
    if any(map(is_sharded, model.parameters())):
        raise AttributeError("FSDP gathers weights only when the whole model is called")
    inner = without_peft(model)
    body, head = inner.base_model, inner.get_output_embeddings()
    if body is inner or head is None:
        raise AttributeError("no body apart from the head")
    config = inner.config.get_text_config() if hasattr(inner, "config") else None
    settings = config.to_dict() if config is not None else {}
    cap = settings.pop("final_logit_softcapping", None)
    if any("logit" in name and value not in (None, 1, False) for name, value in settings.items()):
        raise AttributeError("the logits are not the output of the head")  # but scaled
    if cap is not None:
        return body, lambda states: cap * torch.tanh(head(states) / cap)
    return body, head


def _hidden_states(body: nn.Module, inputs: dict[str, Any]) -> Tensor:
    if "use_cache" in inspect.signature(body.forward).parameters:
        inputs = {**inputs, "use_cache": False}
    return cast(Tensor, body(**inputs).last_hidden_state)
