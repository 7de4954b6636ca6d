"""How much is measured: the limits of the tests, their samples and tokens, and about how long."""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from holdfast._torch.batch import logits_of, to_device
from holdfast.evaluate.kl import KL, ContextFreeKL
from holdfast.evaluate.probes import BLOCK, Completions, Probe, Sized, Text
from holdfast.io.models import Loaded
from holdfast.report.words import seconds
from holdfast.scoring.draw import vocabulary_size

#: Tokens that are run to estimate the time: on a CPU few, because they take long there.
_TOKENS, _TOKENS_ON_A_CPU = 1 << 13, 1 << 6


def limited(test: Probe, loaded: Loaded, samples: int | None, tokens: int | None) -> Any:
    """Return a test within limits. A block of tokens is one sample of a running text.

    Rows are limited when they are read.
    """
    limits = [tokens] if tokens else []
    if samples and isinstance(test, Text):
        limits.append(samples * BLOCK)
    return test.within(loaded, min(limits)) if limits and isinstance(test, Sized) else test


def overview(tests: Sequence[Probe], kls: Sequence[KL], loaded: Loaded) -> Iterator[str]:
    """Yield lines: how long the tests take, and what each of them consists of."""
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
    what = "1 test" if len(lines) == 1 else f"{len(lines)} tests"
    each = seconds_per_token(loaded) if tokens + drawn else None
    if each is not None:
        # The base draws the texts, and then predicts them as the other models do.
        base, other = (seconds(each * (tokens + n * drawn)) for n in (2, 1))
        about = "at least" if others else "about"
        what += f", {about} {base} for the base and {other} for each other model"
    yield f"{what}:"
    yield from lines


@torch.inference_mode()
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
