"""``holdfast.measure``: what did a fine-tune cost?

Drift first, streamed from the files; then everything that asks the base model; then, with the base
gone from memory, the same for the tuned model.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holdfast._checks import whole
from holdfast.forgetting.drift import drift as measure_drift
from holdfast.forgetting.harness import Harness
from holdfast.forgetting.inputs import Data, PathLike, kl_of, named, probe_of, texts_from
from holdfast.forgetting.kl import KL, ContextFreeKL
from holdfast.forgetting.models import Loaded, Loader, Source
from holdfast.forgetting.probes import Probe
from holdfast.forgetting.report import Divergence, ForgettingReport, Score

__all__ = ["measure"]


def measure(
    base: Source,
    tuned: Source,
    *,
    text: PathLike | Sequence[PathLike] | Mapping[str, str] = (),
    data: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
    target: Data | Mapping[str, Data] = (),
    tasks: Sequence[str] = (),
    probes: Sequence[Probe] = (),
    include_path: PathLike | None = None,
    drift: bool = True,
    context_free: int = 64,
    limit: int | None = None,
    kl_samples: int = 64,
    max_length: int = 1024,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    tokenizer: Any = None,
    start_token: int | None = None,
    allow_pickle: bool = False,
    seed: int = 0,
    progress: bool = True,
) -> ForgettingReport:
    """Compare a tuned model with the one that it was tuned from.

    With no data at all it tells how far the weights moved and, of a causal language model, how far
    its predictions did, on texts that the base writes itself.

    Args:
        base, tuned: directories or hub names of transformers models (a LoRA adapter as ``tuned``
            sits on ``base``), GGUF files, or modules in memory.
        text: texts to take the perplexity of: paths, or name → text.
        data: rows to be tested on: paths, or name → path or rows. Their columns tell the kind:
            ``choices`` and ``label`` are multiple choice, a question and an answer are
            completions, a text and a ``label`` are classification.
        target: what the model was tuned for, of the same kinds as ``data``. The divergence of
            the predictions is taken on its inputs.
        tasks: of lm-evaluation-harness, by name.
        probes: tests of your own: :class:`~holdfast.forgetting.probes.Probe`.
        include_path: where YAML files of further tasks lie.
        drift: whether to compare the weights.
        context_free: how many texts the base writes; 0 for none.
        limit: rows of each file and samples of each task at most.
        kl_samples: rows of the target that the divergence is taken on.
        max_length: of sequences, in tokens; a model's own limit is respected.
        device, dtype: where and how to run the models; None takes an accelerator if there is one,
            and float32 on the CPU or the checkpoint's dtype elsewhere.
        tokenizer: for modules in memory, or to use another than the model's.
        start_token: for ``context_free``, where a model has no BOS token.
        allow_pickle: read ``.bin`` files too.
        seed: of the texts that the base writes.
        progress: show how far it is.

    Example:
        >>> import torch, holdfast
        >>> base, tuned = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = tuned.load_state_dict(base.state_dict())
        >>> holdfast.measure(base, tuned, progress=False).drift.total.distance
        0.0
    """
    for name, value, least in (
        ("context_free", context_free, 0),
        ("kl_samples", kl_samples, 0),
        ("max_length", max_length, 2),
        ("limit", 1 if limit is None else limit, 1),
    ):
        whole(name, value, least)
    targets = [probe_of(name, d, "target", limit) for name, d in named(target, "target").items()]
    tests: list[Probe] = [*texts_from(text)]
    tests += [probe_of(name, d, "retained", limit) for name, d in named(data, "data").items()]
    tests += targets
    if tasks:
        tests.append(Harness(tuple(tasks), include_path, limit))
    tests += probes

    moved = None
    if drift:
        moved = measure_drift(base, tuned, allow_pickle=allow_pickle, progress=progress)
    loader = Loader(device, dtype, max_length, tokenizer, allow_pickle)
    free = ContextFreeKL(context_free, start=start_token, seed=seed) if context_free else None
    meter = _Meter(tests, free, targets, kl_samples, progress)
    if free and not tests and (reason := loader.cannot_write(base)):
        meter.notes.append(f"No context-free divergence: {reason}.")
    elif free or tests:
        with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
            with loader.open(base) as loaded:
                meter.ask_base(loaded, Path(folder))
            del loaded  # or it would be in memory beside the tuned model
            with loader.open(tuned, base) as loaded:
                meter.ask_tuned(loaded)
    return ForgettingReport(
        base=_name(base),
        tuned=_name(tuned),
        drift=moved,
        divergences=tuple(meter.divergences),
        scores=tuple(meter.scores),
        notes=tuple(meter.notes),
        settings={
            "limit": limit,
            "max_length": max_length,
            "context_free": context_free,
            "kl_samples": kl_samples,
            "dtype": str(dtype or "auto").removeprefix("torch."),
            "seed": seed,
        },
        versions=_versions(),
    )


class _Meter:
    """What is asked of the two models, one after the other, and what they said."""

    def __init__(
        self,
        tests: Sequence[Probe],
        free: ContextFreeKL | None,
        inputs: Sequence[Probe],
        samples: int,
        progress: bool,
    ) -> None:
        self.tests, self.free, self.inputs = tests, free, inputs
        self.samples, self.progress = samples, progress
        self.kls: list[KL] = []
        self.before: list[Any] = []
        self.notes: list[str] = []
        self.divergences: list[Divergence] = []
        self.scores: list[Score] = []

    def ask_base(self, loaded: Loaded, folder: Path) -> None:
        """Run the tests, and keep what it predicts in the folder."""
        if self.free and loaded.kind == "causal_lm":
            self.kls.append(self.free)
        elif self.free:
            self.notes.append("No context-free divergence: the model does not write texts.")
        for probe in self.inputs if self.samples else ():
            if kl := kl_of(probe, loaded, self.samples):
                self.kls.append(kl)
        for kl in self.kls:
            kl.remember(loaded, folder, progress=self.progress)
        self.before = [test.run(loaded, progress=self.progress) for test in self.tests]

    def ask_tuned(self, loaded: Loaded) -> None:
        """Run the same tests, and compare."""
        for kl in self.kls:
            try:
                self.divergences.append(kl.compare(loaded, progress=self.progress))
            except ValueError as error:  # a new head has other classes
                self.notes.append(f"No divergence on {kl.name}: {error}.")
        for test, before in zip(self.tests, self.before, strict=True):
            self.scores += test.scores(before, test.run(loaded, progress=self.progress))


def _name(source: Source) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("holdfast", "torch", "transformers", "peft", "lm_eval"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
