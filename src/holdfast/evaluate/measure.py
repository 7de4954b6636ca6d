"""``holdfast.measure``: what did a fine-tune cost?

Drift first, streamed from the files; then everything that asks the base model; then, with the base
gone from memory, the same for the tuned model, or for one tuned model after another.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast._torch.checks import whole
from holdfast.evaluate.classify import Classification, HeadAgreement
from holdfast.evaluate.drift import drift as measure_drift
from holdfast.evaluate.harness import Harness
from holdfast.evaluate.inputs import (
    Data,
    PathLike,
    kl_of,
    named,
    probe_of,
    similarity_of,
    texts_from,
)
from holdfast.evaluate.kl import KL, ContextFreeKL
from holdfast.evaluate.probes import Probe
from holdfast.evaluate.report import Divergence, ForgettingReport, Score
from holdfast.evaluate.similarity import Similarity
from holdfast.io.heads import NewHead, head_like
from holdfast.io.models import Loaded, Loader, ModelSource, is_headless

__all__ = ["measure", "measure_many"]


def measure(
    base: ModelSource,
    tuned: ModelSource,
    *,
    text: PathLike | Sequence[PathLike] | Mapping[str, str] = (),
    data: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
    target: Data | Mapping[str, Data] = (),
    similarity: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
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
            completions, a text or an image and a ``label`` are classification (of a model that
            predicts a number: regression). A path is a file, a directory that
            ``datasets.save_to_disk`` wrote (``dir:split``), a folder of images in a folder for each
            class, or a dataset of the hub (``name:split``, ``name:configuration:split``).
        target: what the model was tuned for, of the same kinds as ``data``. The divergence of
            the predictions is taken on its inputs. A base without a head for it gets a new one,
            drawn as ``holdfast finetune`` draws it.
        similarity: pairs of texts and how alike they are, of the same sources: how well the
            nearness of an encoder's hidden states agrees.
        tasks: of lm-evaluation-harness, by name.
        probes: tests of your own: :class:`~holdfast.evaluate.probes.Probe`.
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
    (report,) = _reports(
        base, [(_name(tuned), tuned)], text=text, data=data, target=target,
        similarity=similarity, tasks=tasks, probes=probes, include_path=include_path,
        drift=drift, context_free=context_free, limit=limit, kl_samples=kl_samples,
        max_length=max_length, device=device, dtype=dtype, tokenizer=tokenizer,
        start_token=start_token, allow_pickle=allow_pickle, seed=seed, progress=progress,
    )  # fmt: skip
    return report


def measure_many(
    base: ModelSource, tuned: Iterable[tuple[str, ModelSource | None]], **options: Any
) -> Generator[ForgettingReport, None, None]:
    """Compare several models with the base, which is asked only once.

    A model is taken from ``tuned`` when the report of the one before has been given: it may be
    made for the occasion and be gone afterwards.

    Args:
        base: as for :func:`measure`.
        tuned: names and models; None is the base itself, whose scores are known by then.
        options: of :func:`measure`.

    The base alone, before anything is tuned, in the ``before`` of each score::

        options = {"text": ["wiki.txt"], "drift": False, "context_free": 0, "kl_samples": 0}
        (report,) = measure_many(base, [("base", None)], **options)
    """
    defaults = measure.__kwdefaults__ or {}
    if unknown := sorted(options.keys() - defaults.keys()):
        raise TypeError(f"measure has no option {unknown[0]!r}: it has {', '.join(defaults)}")
    return _reports(base, tuned, **{**defaults, **options})


def _reports(
    base: ModelSource,
    tuned: Iterable[tuple[str, ModelSource | None]],
    *,
    text: PathLike | Sequence[PathLike] | Mapping[str, str],
    data: PathLike | Sequence[PathLike] | Mapping[str, Data],
    target: Data | Mapping[str, Data],
    similarity: PathLike | Sequence[PathLike] | Mapping[str, Data],
    tasks: Sequence[str],
    probes: Sequence[Probe],
    include_path: PathLike | None,
    drift: bool,
    context_free: int,
    limit: int | None,
    kl_samples: int,
    max_length: int,
    device: torch.device | str | None,
    dtype: torch.dtype | None,
    tokenizer: Any,
    start_token: int | None,
    allow_pickle: bool,
    seed: int,
    progress: bool,
) -> Generator[ForgettingReport, None, None]:
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
    pairs = named(similarity, "similarity")
    tests += [similarity_of(name, d, limit) for name, d in pairs.items()]
    tests += targets
    if tasks:
        tests.append(Harness(tuple(tasks), include_path, limit))
    tests += probes
    if not isinstance(base, nn.Module) and (Path(base) / "adapter_config.json").is_file():
        raise ValueError(f"{base} is an adapter: give the model that it sits on as the base")
    loader = Loader(device, dtype, max_length, tokenizer, start_token, allow_pickle)
    free = ContextFreeKL(context_free, start=start_token, seed=seed) if context_free else None
    settings = {
        "limit": limit,
        "max_length": max_length,
        "context_free": context_free,
        "kl_samples": kl_samples,
        "dtype": str(dtype or "auto").removeprefix("torch."),
        "seed": seed,
    }
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        meter = _Meter(loader, tests, free, targets, kl_samples, progress, Path(folder))
        for name, source in tuned:
            moved = None
            if drift:
                after = base if source is None else source
                moved = measure_drift(base, after, allow_pickle=allow_pickle, progress=progress)
                del after
            answers = meter.ask(base, source)
            del source  # or it would be in memory beside the next one
            yield ForgettingReport(
                base=_name(base),
                tuned=name,
                drift=moved,
                divergences=tuple(answers.divergences),
                scores=tuple(answers.scores),
                notes=tuple(answers.notes),
                settings=dict(settings),
                versions=_versions(),
            )


@dataclass
class _Answers:
    """What a model said beside the base."""

    divergences: list[Divergence] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class _Meter:
    """What is asked of the models, one after the other, and what the base said."""

    def __init__(
        self,
        loader: Loader,
        tests: Sequence[Probe],
        free: ContextFreeKL | None,
        inputs: Sequence[Probe],
        samples: int,
        progress: bool,
        folder: Path,
    ) -> None:
        self.loader, self.tests, self.free, self.inputs = loader, tests, free, inputs
        self.samples, self.progress, self.folder = samples, progress, folder
        self.kls: list[KL] = []
        self.before: list[Any] | None = None  # the base was not asked
        self.notes: list[str] = []

    def ask(self, base: ModelSource, tuned: ModelSource | None) -> _Answers:
        """Ask the base if it was not asked before, then the tuned model; None is the base."""
        if not self.tests and not self.free:
            return _Answers()
        if self.free and not self.tests and (reason := self.loader.cannot_generate(base)):
            return _Answers(notes=[f"No context-free divergence: {reason}."])
        if self.before is None:
            self.loader = self.loader.shared_by(base, base if tuned is None else tuned)
            head = self._new_head(base, tuned)
            with self.loader.open(base, head=head) as loaded:
                self.before = self._ask_base(loaded, head)
                # One tokenizer for both: other tokens would be another test.
                self.loader = replace(self.loader, tokenizer=loaded.tokenizer)
            del loaded  # or it would be in memory beside the tuned model
        with self.loader.open(base if tuned is None else tuned, base) as loaded:
            return self._compare(loaded, self.before, itself=tuned is None)

    def _new_head(self, base: ModelSource, tuned: ModelSource | None) -> NewHead | None:
        """What the base lacks to be tested on the classes of the tuned model, if they are."""
        if tuned is None or not any(isinstance(test, Classification) for test in self.tests):
            return None
        return head_like(base, tuned)

    def _ask_base(self, loaded: Loaded, head: NewHead | None) -> list[Any]:
        """Run the tests, and keep what it predicts in the folder."""
        asking = [test for test in self.tests if not isinstance(test, Similarity)]
        if asking and hasattr(loaded.model, "config") and is_headless(loaded.model):
            raise ValueError(
                f"the base is a {type(loaded.model).__name__}, which has no head and predicts "
                "nothing to compare with: give a base with a head, or measure the drift and "
                "similarity alone, without text, data, target and tasks"
            )
        if head is not None:
            self.notes.append(
                f"The base has no head for this task: it was tested with a new one ({head}), "
                "which knows nothing yet."
            )
        if self.free and loaded.kind == "causal_lm":
            self.kls.append(self.free)
        elif self.free:
            self.notes.append("No context-free divergence: the model does not write texts.")
        for probe in self.inputs if self.samples and head is None else ():
            if kl := kl_of(probe, loaded, self.samples):
                self.kls.append(kl)
        for kl in self.kls:
            kl.remember(loaded, self.folder, progress=self.progress)
        for test in self.tests:
            if isinstance(test, HeadAgreement):
                test.begin()
        return [test.run(loaded, progress=self.progress) for test in self.tests]

    def _compare(self, loaded: Loaded, known: Sequence[Any], itself: bool) -> _Answers:
        """Run the same tests, unless it is the base itself, and compare."""
        answers = _Answers(notes=list(self.notes))
        for kl in self.kls:
            try:
                answers.divergences.append(kl.compare(loaded, progress=self.progress))
            except ValueError as error:  # a new head has other classes
                answers.notes.append(f"No divergence on {kl.name}: {error}.")
        for test, before in zip(self.tests, known, strict=True):
            after = before if itself else test.run(loaded, progress=self.progress)
            answers.scores += test.scores(before, after)
        return answers


def _name(source: ModelSource) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def _versions() -> dict[str, str]:
    found = {"holdfast": holdfast.__version__}
    for package in ("torch", "transformers", "peft", "lm_eval"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found
