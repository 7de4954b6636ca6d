"""``holdfast.measure``: how much a fine-tuned model forgot.

The drift is computed first, streamed from the files. Then all tests run on the base model. With the
base freed from memory, each tuned model takes the same tests.
"""

import contextlib
import shutil
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from torch import nn

from holdfast._torch.checks import named_settings
from holdfast._torch.version import __version__
from holdfast.evaluate.amount import Amount, amount_of, limited
from holdfast.evaluate.asking import Asking, run_all
from holdfast.evaluate.classify import Classification, HeadAgreement
from holdfast.evaluate.drift import drift as measure_drift
from holdfast.evaluate.kl import KL, ContextFreeKL
from holdfast.evaluate.probes import Probe, Similarity
from holdfast.evaluate.report import Divergence, ForgettingReport, Score
from holdfast.evaluate.suite import Data, PathLike, Suite, kl_of, mentions
from holdfast.io.adapter import is_adapter
from holdfast.io.heads import ModelSource, NewHead, head_like, is_headless
from holdfast.io.models import Loaded, Loader
from holdfast.io.tokens import TokenChange, token_change
from holdfast.io.untrusted import parse_yaml
from holdfast.recipe import Recipe, as_recipe, recipe_beside
from holdfast.report.command import command
from holdfast.report.printing import tell_line


@named_settings
def measure(
    base: ModelSource,
    tuned: ModelSource,
    *,
    text: PathLike | Sequence[PathLike] | Mapping[str, str] = (),
    data: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
    target: Data | Mapping[str, Data] = (),
    similarity: PathLike | Sequence[PathLike] | Mapping[str, Data] = (),
    tasks: Sequence[str] = (),
    include_path: PathLike | None = None,
    probes: Sequence[Probe] = (),
    limit: int | None = None,
    context_free: int | ContextFreeKL = 64,
    kl_samples: int = 64,
    limit_tokens: int | None = None,
    columns: Mapping[str, str] | None = None,
    drift: bool = True,
    recipe: Recipe | str | None = None,
    loader: Loader | None = None,
    progress: bool = True,
) -> ForgettingReport:
    """Compare a tuned model with the model that it was tuned from.

    Without any data, the report shows how far the weights moved and, for a causal language model,
    how far the predictions moved on texts that the base generates itself.

    Args:
        base, tuned: directories or hub names of transformers models, GGUF files, or modules in
            memory. ``tuned`` may be an adapter on ``base``.
        text: texts to compute the perplexity of: paths, or name → text.
        data: rows of tasks to retain: paths, or name → path or rows. The columns decide the test:
            ``choices`` and ``label`` are multiple choice, a question and an answer are completions,
            ``messages`` are conversations (the answers are the assistant's turns), a text or an
            image and a ``label`` are classification (regression if the model predicts a number). A
            path is a file, a pattern of files (``dir/*.jsonl``), a directory that
            ``datasets.save_to_disk`` wrote (``dir:split``), a folder with one folder of images per
            class, or a dataset on the hub (``name:split``, ``name:configuration:split``).
        target: rows of the task that the model was tuned for, like ``data``. The divergence of the
            predictions is computed on its inputs. A base without a head for it gets a new head with
            the same initial weights as in ``holdfast finetune``.
        similarity: rows with two texts and a number, like ``data``: how well the similarity of an
            encoder's embeddings agrees with the numbers.
        tasks: names of lm-evaluation-harness tasks.
        include_path: a directory with YAML files of further tasks.
        probes: your own tests, see :class:`~holdfast.evaluate.probes.Probe`.
        limit: the maximum number of samples per test: of rows per file, of samples per task, of
            texts that the base generates, and of blocks of 128 tokens of a running text.
        limit_tokens: the maximum number of tokens per test, for each model. Of rows, as many as fit
            are tested, but at least one. It does not apply to images and to ``tasks``.
        context_free: the number of texts that the base generates for the data-free divergence, or
            a :class:`~holdfast.evaluate.kl.ContextFreeKL` with its own settings; 0 for none.
        kl_samples: the number of target rows that the divergence is computed on.
        columns: a column map for rows with other columns: ``{"question": "problem", "answer":
            "solution"}``. The target must have its columns; other data that lacks one of them is
            read without the map.
        drift: whether to compare the weights.
        recipe: the recipe of the tuned model. The report then says which figures were a training
            signal. If None, ``holdfast_recipe.yaml`` in the directory of the tuned model is read,
            which ``holdfast finetune`` and the Hugging Face Trainer write.
        loader: how to load and run the models: device, dtype, maximum length, tokenizer.
        progress: show what will be measured and about how long it takes, and progress bars. If
            stderr is not a terminal, progress is a line now and then.

    Example:
        >>> import torch, holdfast
        >>> base, tuned = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> _ = tuned.load_state_dict(base.state_dict())
        >>> holdfast.measure(base, tuned, progress=False).drift.total.distance
        0.0
    """
    suite = Suite(
        text, data, target, similarity, tasks, include_path, probes, limit, context_free,
        kl_samples, limit_tokens, columns or {},
    )  # fmt: skip
    given = None if recipe is None else as_recipe(recipe)
    return Meter(base, suite, drift, loader, progress)(_name(tuned), tuned, given)


def measure_many(
    base: ModelSource,
    tuned: Iterable[tuple[str, ModelSource | None]],
    *,
    drift: bool = True,
    loader: Loader | None = None,
    progress: bool = True,
    **tests: Any,
) -> Generator[ForgettingReport, None, None]:
    """Compare several models with the base, which takes the tests only once.

    ``tuned`` are pairs of a name and a model; None stands for the base itself. The next model is
    taken after the report of the previous one was yielded, so a generator can create one model at a
    time. The other arguments, ``tests`` among them, are those of :func:`measure`.

    To test the base alone, read the ``before`` of each score::

        tests = {"text": ["wiki.txt"], "context_free": 0, "kl_samples": 0}
        (report,) = measure_many(base, [("base", None)], drift=False, **tests)
    """
    suite = Suite(**tests)  # raises at once

    def reports() -> Generator[ForgettingReport, None, None]:
        meter = Meter(base, suite, drift, loader, progress)
        for name, source in tuned:
            report = meter(name, source)
            del source  # frees the model before the next one is created
            yield report

    return reports()


@dataclass
class Compared:
    """The results of one model compared with the base."""

    divergences: list[Divergence] = field(default_factory=list)
    scores: list[Score] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    split: tuple[str, ...] = ()


class Examination:
    """The tests of a suite and the results of the base: first :meth:`start`, then :meth:`compare`.

    ``tokens`` is the maximum length of the texts that the base generates.
    """

    def __init__(self, suite: Suite, *, tokens: int = 64, progress: bool = False) -> None:
        self.tests, self.targets = suite.build()
        self.free, self.samples = suite.context_free_kl(tokens), suite.kl_samples
        self.limits = suite.limit, suite.limit_tokens
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-"))  # of the base's predictions
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.progress = progress
        self.kls: list[KL] = []
        self.before: list[Any] = []
        self.notes: list[str] = []

    def start(self, loaded: Loaded, head: NewHead | None = None) -> None:
        """Run the tests on the base, which may have a new head, and store its predictions."""
        self.prepare(loaded, head)
        if self.progress:
            for line in str(self.amount(loaded)).splitlines():
                tell_line(line, file=sys.stderr)
        for kl in self.kls:
            kl.remember(loaded, self.folder, progress=self.progress)
        for test in self.tests:
            if isinstance(test, HeadAgreement):
                test.begin()
        self.before = run_all(self.tests, loaded, progress=self.progress)

    def prepare(self, loaded: Loaded, head: NewHead | None = None) -> None:
        """Limit the tests, and choose those and the divergences that suit the base."""
        if head is not None:
            tested = f"It was tested with a new, untrained head ({head})."
            self.notes.append(f"The base has no head for this task. {tested}")
        within = {}
        for test in self.tests:
            if reason := test.unfit(loaded) if isinstance(test, Asking) else "":
                self.notes.append(f"No test of {test.name}: {reason}.")
            else:
                within[id(test)] = limited(test, loaded, *self.limits)
        self.tests = [within[id(test)] for test in self.tests if id(test) in within]
        self.targets = [within[id(test)] for test in self.targets if id(test) in within]
        if self.free and loaded.kind == "causal_lm":
            self.kls.append(self.free)
        elif self.free:
            self.notes.append("No context-free divergence: the model does not generate texts.")
        for probe in self.targets if self.samples and head is None else ():
            if kl := kl_of(probe, loaded, self.samples):
                self.kls.append(kl)

    def amount(self, loaded: Loaded) -> Amount:
        """How much the tests are, after :meth:`prepare`."""
        return amount_of(self.tests, self.kls, loaded)

    def compare(
        self,
        loaded: Loaded,
        *,
        is_base: bool = False,
        recipe: Recipe | None = None,
        new_tokens: Sequence[str] = (),
    ) -> Compared:
        """Run the tests on another model and compare; the base itself does not run again."""
        named = (test.name for test in self.tests if mentions(test, new_tokens))
        answers = Compared(notes=[*self.notes], split=tuple(dict.fromkeys(named)))
        rehearsed = recipe is not None and recipe.recall.trains_on_drawn_texts
        for kl in self.kls:
            try:
                found = kl.compare(loaded, progress=self.progress)
                signal = rehearsed and kl.on_drawn_texts
                answers.divergences.append(replace(found, trained_on=signal))
            except ValueError as error:  # a new head has other classes
                answers.notes.append(f"No divergence on {kl.name}: {error}.")
        results = self.before
        if not is_base:
            results = run_all(self.tests, loaded, progress=self.progress)
        for test, before, after in zip(self.tests, self.before, results, strict=True):
            answers.scores += test.scores(before, after)
        return answers


class Meter:
    """Compares models with a base, which takes the tests once, at the first call."""

    def __init__(
        self, base: ModelSource, suite: Suite, drift: bool, loader: Loader | None, progress: bool
    ) -> None:
        if is_adapter(base):
            raise ValueError(
                f"{base} is an adapter: pass the model that it was trained on as the base"
            )
        self.base, self.suite, self.drift, self.loader = base, suite, drift, loader or Loader()
        self.started, self.progress = False, progress
        self.exam = Examination(suite, progress=progress)
        self.settings = {
            "limit": suite.limit,
            "limit_tokens": suite.limit_tokens,
            "max_length": self.loader.max_length,
            "context_free": self.exam.free.texts if self.exam.free else 0,
            "kl_samples": suite.kl_samples,
            "dtype": str(self.loader.dtype or "auto").removeprefix("torch."),
            "seed": self.exam.free.seed if self.exam.free else 0,
        }

    def __call__(
        self, name: str, tuned: ModelSource | None, recipe: Recipe | None = None
    ) -> ForgettingReport:
        """Compare a model, or the base itself (None).

        ``recipe`` is the recipe of the model; if None, the one beside the model counts.
        """
        if self.exam.tests and not self.started and not isinstance(self.base, nn.Module):
            with contextlib.suppress(ImportError):  # the drift alone does not need transformers
                self._check_head(self.loader.skeleton(str(self.base), self._head(tuned)))
        moved = None
        if self.drift:
            after, pickle = self.base if tuned is None else tuned, self.loader.allow_pickle
            moved = measure_drift(self.base, after, allow_pickle=pickle, progress=self.progress)
        found = self._examine(tuned, recipe or recipe_beside(tuned))
        return ForgettingReport(
            base=_name(self.base),
            tuned=name,
            drift=moved,
            divergences=tuple(found.divergences),
            scores=tuple(found.scores),
            notes=tuple(found.notes),
            split=found.split,
            settings={**self.settings, **self._facts_of(tuned)},
            versions=_versions(),
        )

    def _facts_of(self, tuned: ModelSource | None) -> dict[str, str | float]:
        """The command line that measures the same, and how long ``finetune`` trained the model.

        Whoever runs it decides anew whether to trust the code and the pickles of a model.
        """
        models, device = [_word(self.base, "BASE"), _word(tuned, "TUNED")], self.loader.device
        found: dict[str, str | float] = {}
        if (tests := self.suite.options()) is not None:
            length, dtype = self.settings["max_length"], self.settings["dtype"]
            tests |= {
                "test_max_length": None if length == Loader.max_length else length,
                "drift": None if self.drift else False,
                "dtype": None if dtype == "auto" else dtype,
                "device": None if device is None else str(device),
            }
            found["command"] = command("measure", *models, **tests)
        file = Path(models[1], "config.yaml")
        with contextlib.suppress(AttributeError, KeyError, OSError, TypeError, ValueError):
            given: Any = parse_yaml(file.read_text(encoding="utf-8"), str(file))
            if (given["max_updates"], given["patience"]) == (None, None):
                found["epochs"] = float(given["epochs"])
        return found

    def _examine(self, tuned: ModelSource | None, recipe: Recipe | None) -> Compared:
        exam, base = self.exam, self.base
        tokens = token_change(base, tuned)
        notes = list(on_ids(tokens))
        if not tokens.same_ids or not (exam.tests or exam.free):
            return Compared(notes=notes)
        if exam.free and not exam.tests and (reason := self.loader.cannot_generate(base)):
            return Compared(notes=[*notes, f"No context-free divergence: {reason}."])
        if not self.started:
            self._start(base, tuned)
        with self.loader.open(base if tuned is None else tuned, base) as loaded:
            new, is_base = tokens.new, tuned is None
            found = exam.compare(loaded, is_base=is_base, recipe=recipe, new_tokens=new)
            return replace(found, notes=[*notes, *found.notes])

    def _start(self, base: ModelSource, tuned: ModelSource | None) -> None:
        self.loader = self.loader.shared_by(base, base if tuned is None else tuned)
        head = self._head(tuned)
        with self.loader.open(base, head=head) as loaded:
            self._check_head(loaded.model)
            self.exam.start(loaded, head)
            # Both models use one tokenizer: other tokens would be another test.
            self.loader = replace(self.loader, tokenizer=loaded.tokenizer)
        self.started = True

    def _head(self, tuned: ModelSource | None) -> NewHead | None:
        """The new head that the base needs to take the tests of the tuned model."""
        if tuned is None or not any(isinstance(t, Classification) for t in self.exam.tests):
            return None
        trust = self.loader.trust_remote_code
        return head_like(self.base, tuned, trust_remote_code=trust)

    def _check_head(self, model: nn.Module) -> None:
        """Refuse a base that cannot take the tests, judged by its structure."""
        predicting = [test for test in self.exam.tests if not isinstance(test, Similarity)]
        if predicting and hasattr(model, "config") and is_headless(model):
            raise ValueError(
                f"the base is a {type(model).__name__}, which has no head and makes no "
                "predictions: use a base with a head, or measure only the drift and "
                "similarity, without text, data, target and tasks"
            )
        for test in self.exam.tests:
            if isinstance(test, Classification):
                test.check_kind(model)


def on_ids(tokens: TokenChange) -> Iterator[str]:
    """Say how many tokens have other ids, and what that means."""
    if not tokens.moved:
        return
    some = (
        f"{tokens.moved:,} of {tokens.both:,} tokens have other ids in the tuned model's tokenizer"
    )
    if tokens.same_ids:
        yield f"{some}. Their rows and their predictions are compared with those of other tokens."
    else:
        yield (
            f"{some}, so the vocabulary was replaced. Rows per token are not compared, and there "
            "is no divergence and no test, because both models would read the base's ids."
        )


def _name(source: ModelSource) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)


def _word(source: ModelSource | None, in_memory: str) -> str:
    """A model on the command line."""
    return in_memory if source is None or isinstance(source, nn.Module) else str(source)


def _versions() -> dict[str, str]:
    found = {"holdfast": __version__}
    for package in ("torch", "transformers", "peft", "lm_eval"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
