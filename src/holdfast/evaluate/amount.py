"""How much is measured: the limits of the tests, their samples and tokens, and about how long."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast._torch.batch import logits_of, to_device
from holdfast._torch.vocabulary import vocabulary_size
from holdfast.evaluate.kl import KL, ContextFreeKL
from holdfast.evaluate.probes import BLOCK, Completions, Probe, Sized, Text
from holdfast.io.models import Loaded
from holdfast.report.words import seconds

#: Tokens that are run to estimate the time: on a CPU few, because they take long there.
_TOKENS, _TOKENS_ON_A_CPU = 1 << 13, 1 << 6
_SAMPLES = 64  # whose lengths are averaged
_TRAINING = 3  # forward passes that the forward and backward passes of a training are worth


def limited(test: Probe, loaded: Loaded, samples: int | None, tokens: int | None) -> Any:
    """Return a test within limits. A block of tokens is one sample of a running text.

    Rows are limited when they are read.
    """
    limits = [tokens] if tokens else []
    if samples and isinstance(test, Text):
        limits.append(samples * BLOCK)
    return test.within(loaded, min(limits)) if limits and isinstance(test, Sized) else test


@dataclass(frozen=True)
class Amount:
    """What tests consist of, and about how long they take on a model.

    Attributes:
        lines: what each test consists of.
        base: seconds for the base, which also draws texts; None if its speed is not known.
        other: seconds for each other model.
        is_part: whether there are tests whose time is not known.
    """

    lines: list[str]
    base: float | None
    other: float | None
    is_part: bool

    def __str__(self) -> str:
        what = "1 test" if len(self.lines) == 1 else f"{len(self.lines)} tests"
        if self.base is not None and self.other is not None:
            about = "at least" if self.is_part else "about"
            what += f", {about} {seconds(self.base)} for the base and {seconds(self.other)} for "
            what += "each other model"
        return "\n".join([f"{what}:", *self.lines])


def amount_of(tests: Sequence[Probe], kls: Sequence[KL], loaded: Loaded) -> Amount:
    """Return the amount of work of the tests, after a short run of the model."""
    tokens, others, lines = 0, 0, []
    diverging = {kl.name for kl in kls}
    for test in tests:
        lengths = test.lengths(loaded) if isinstance(test, Sized) else []
        # The divergence on completions and the test share a pass over the model.
        again = test.name in diverging and not isinstance(test, Completions)
        tokens += sum(lengths) * (2 if again else 1)
        others += not lengths
        rows = "" if isinstance(test, Text) else f"{len(lengths):,} rows, "
        lines.append(f"- {test.name}" + (f": {rows}{sum(lengths):,} tokens" if lengths else ""))
    drawn = 0
    for kl in kls:
        if isinstance(kl, ContextFreeKL):
            drawn = kl.texts * kl.tokens
            lines.append(f"- {kl.name}: {kl.texts:,} texts of at most {kl.tokens:,} tokens")
    each = seconds_per_token(loaded) if tokens + drawn else None
    if each is None:
        return Amount(lines, None, None, bool(others))
    # The base draws the texts, and then predicts them as the other models do.
    return Amount(lines, each * (tokens + 2 * drawn), each * (tokens + drawn), bool(others))


def training_seconds(loaded: Loaded, samples: Sequence[Any]) -> float | None:
    """Return about how long one training sample takes; None if samples are not tokens."""
    first: Any = samples[0]
    if not isinstance(first, Mapping) or not isinstance(first.get("input_ids"), list):
        return None
    some = [samples[i] for i in range(0, len(samples), max(1, len(samples) // _SAMPLES))]
    each = seconds_per_token(loaded)
    tokens = sum(len(sample["input_ids"]) for sample in some) / len(some)
    return None if each is None else _TRAINING * tokens * each


@torch.no_grad()  # a training must not meet tensors of the inference mode
def seconds_per_token(loaded: Loaded) -> float | None:
    """Run the model on a few tokens to estimate its speed; None if it does not accept them."""
    length = min(64, loaded.limit)
    most = _TOKENS_ON_A_CPU if loaded.device.type == "cpu" else _TOKENS
    spent: float | None = None
    # A model may refuse tokens that are not a text.
    with contextlib.suppress(AttributeError, RuntimeError, TypeError, ValueError):
        every = torch.arange(max(1, most // length) * length) % vocabulary_size(loaded.model)
        ids = every.view(-1, length)
        # The first call takes longer, and so does any while the machine has other work.
        for some in (ids[:1, :8], ids, ids):
            batch = {"input_ids": some, "attention_mask": torch.ones_like(some)}
            begin = time.perf_counter()
            logits_of(loaded.model, to_device(batch, loaded.device)).sum().item()
            each = (time.perf_counter() - begin) / some.numel()
            spent = each if spent is None else min(spent, each)
    return spent
