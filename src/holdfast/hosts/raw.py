"""The raw PyTorch host: a recipe in one short training loop.

model = finetune_loop(model, "recadam+flow", dataset, lr=2e-5, epochs=3)
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from holdfast._torch.batch import to_device
from holdfast._torch.checks import named_settings, natural_number
from holdfast.hosts._driving import LoopSettings, check_watch, drive
from holdfast.hosts._updates import (
    Updates,
    as_samples,
    labels_of,
    number_of_epochs,
    number_of_updates,
    schedule_for,
    source_of,
)
from holdfast.hosts.watching import Observer
from holdfast.losses import LossFunction, Task, count_all
from holdfast.recipe import Recipe
from holdfast.run import Run
from holdfast.stages import TrainingSize


@named_settings
def finetune_loop(
    model: nn.Module,
    recipe: Recipe | str,
    data: Any,
    *,
    lr: float | None = None,
    epochs: float = 1.0,
    batch_size: int = 16,
    task: Task | LossFunction | None = None,
    new: str | tuple[str, ...] | list[str] | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    settings: LoopSettings = LoopSettings(),  # noqa: B008 (frozen)
    checkpoint: str | os.PathLike[str] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    watch: Observer | None = None,
    progress: bool = True,
) -> nn.Module:
    """Fine-tune a model with a recipe, on one device, in a plain loop.

    Args:
        model: the model with its pretrained weights, on the device to train on.
        recipe: the methods, or the name of a preset. ``Recipe()`` is plain fine-tuning.
        data: a map-style dataset (``__len__`` and ``__getitem__``), or a DataLoader over one. The
            loop uses the loader's batch size and collate function, but shuffles by itself.
        lr: the peak learning rate. Required unless the recipe sets it or has a default.
        epochs: passes over the data.
        batch_size: samples per micro-batch.
        task: how labels are interpreted, as for :func:`holdfast.score`. If None, it is inferred
            from a transformers model.
        new: parts of the model without pretrained weights, such as ``"classifier"``. If None, they
            are the parts of the head for which ``from_pretrained`` of transformers found none.
        tokenizer: the tokenizer of a language model, for recipes that draw texts from it.
        seed: the seed of the data order, of dropout and of everything that methods draw.
        settings: accumulation, schedule, clipping, precision, and how often to log and save.
        checkpoint: a file for the state of the run. If it exists, the run resumes from it. The
            result is bit-identical to that of an uninterrupted run.
        log: called with ``update``, ``loss``, ``lr`` and the values of the methods: ``lam`` (λ),
            the ``pull``, penalties. ``loss`` is that of the samples; what self-replay adds to it
            for its texts is ``recall``.
        watch: measures the model during training, as :class:`holdfast.Watch` does. Needs ``log``.
        progress: show progress bars.

    Returns:
        The given model, tuned in place and merged. With LoRA, the PEFT model around it.

    For further options of the methods, such as ``reference=`` or ``cache=``, build a
    :class:`~holdfast.run.Run`, pass it to :func:`train_loop`, and call ``run.finish()``.

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(4, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> model = holdfast.finetune_loop(
        ...     model, "recadam+wise-ft", data, lr=1e-2, task="classification", progress=False
        ... )
    """
    check_watch(watch, log)
    was_training = model.training
    torch.manual_seed(natural_number("seed", seed))
    source = as_samples(data, None, batch_size, model)
    size = source.batch_size * settings.accumulate
    total = number_of_updates(len(source.data), size, epochs, settings.max_updates)
    visited = number_of_epochs(len(source.data), size, epochs, settings.max_updates)
    run = Run(
        recipe, model, source.data, lr=lr, task=task, collate=source.collate, new=new, seed=seed,
        tokenizer=tokenizer, visits=total * size, update_size=size, autocast=settings.autocast,
        size=TrainingSize(len(source.data), visited), progress=progress,
    )  # fmt: skip
    with plain_if_interrupted(run):
        train_loop(
            run, epochs=epochs, batch_size=source.batch_size, settings=settings,
            checkpoint=checkpoint, log=log, watch=watch,
        )  # fmt: skip
    return run.finish().train(was_training)


@contextlib.contextmanager
def plain_if_interrupted(run: Run) -> Iterator[None]:
    """Undo what stage 1 did to the model if training ends with an exception."""
    try:
        yield
    except BaseException:
        run.recipe.trainable.finish(run.model)
        raise


@named_settings
def train_loop(
    run: Run,
    *,
    epochs: float = 1.0,
    batch_size: int = 16,
    settings: LoopSettings = LoopSettings(),  # noqa: B008 (frozen)
    checkpoint: str | os.PathLike[str] | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    watch: Observer | None = None,
) -> None:
    """Train a run up to stage 4, which ``run.finish()`` does.

    Args:
        run: the recipe with its model and data.
        epochs, batch_size, settings, checkpoint, log, watch: as for :func:`finetune_loop`.

    Example:
        >>> import torch
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> options = {"lr": 1e-2, "task": "classification", "progress": False}
        >>> run = Run("recadam", torch.nn.Linear(4, 2), data, **options)
        >>> train_loop(run, epochs=2)
        >>> model = run.finish()
    """
    check_watch(watch, log)
    updates = Updates(
        source_of(run, batch_size), settings.accumulate, run.seed, epochs=epochs,
        max_updates=settings.max_updates, schedule=schedule_for(run, settings.schedule),
    )  # fmt: skip
    drive(
        _PlainLoop(run, updates, settings.autocast), settings,
        checkpoint=checkpoint, log=log, watch=watch,
    )  # fmt: skip


class _PlainLoop:
    """The updates of a run on one device, without a library."""

    def __init__(self, run: Run, updates: Updates, autocast: torch.dtype | None) -> None:
        self.run, self.updates, self.model, self.done = run, updates, run.model, 0
        self.optimizer = run.make_optimizer(updates.total)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]
        self.device = next(run.model.parameters()).device
        self.precision = torch.autocast(
            self.device.type, dtype=autocast, enabled=autocast is not None
        )

    def __iter__(self) -> Iterator[int]:
        self.model.train()
        self.optimizer.zero_grad()
        for update in range(self.done + 1, self.updates.total + 1):
            self.run.advance(update)
            if self.updates.factors:
                for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                    group["lr"] = peak * self.updates.factors[update - 1]
            yield update

    def backward(self) -> Tensor:
        update, run = self.done + 1, self.run
        batches = list(self.updates.batches(update))
        # On the CPU: counting on a GPU takes longer.
        targets = count_all([labels_of(batch, run.task) for batch in batches], run.task)
        run.recall.plan(self.model, update, self.updates.size, len(batches))
        total = torch.zeros((), device=self.device)
        for batch in batches:
            with self.precision:
                loss, whole = run.losses(to_device(batch, self.device), targets, update)
            whole.backward()
            total = total + loss.detach()
        self.done = update
        return total
