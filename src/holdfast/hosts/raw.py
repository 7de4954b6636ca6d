"""The raw-PyTorch host: the architecture at work in one short loop.

model = finetune_loop(model, Recipe.preset("recadam+flow"), dataset, lr=2e-5, epochs=3)
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from holdfast._torch.batch import to_device
from holdfast._torch.checks import above_zero, whole
from holdfast._torch.progress import progress_bar
from holdfast.data import Collate
from holdfast.hosts import _checkpoints as checkpoints
from holdfast.hosts._updates import Updates, as_samples
from holdfast.losses import LossFunction, Task
from holdfast.recipe import Recipe
from holdfast.reference import Reference
from holdfast.run import Run

if TYPE_CHECKING:
    from holdfast.evaluate.watch import Watch

__all__ = ["finetune_loop"]

Schedule = Callable[[int, int], float]


def finetune_loop(
    model: nn.Module,
    recipe: Recipe,
    data: Any,
    *,
    lr: float | None = None,
    epochs: float = 1.0,
    max_updates: int | None = None,
    batch_size: int = 16,
    accumulate: int = 1,
    weight_decay: float = 0.0,
    schedule: Schedule | None = None,
    clip_norm: float | None = None,
    autocast: torch.dtype | None = None,
    task: Task | LossFunction | None = None,
    collate: Collate | None = None,
    new: str | Sequence[str] = (),
    reference: Reference | None = None,
    rehearsal: Any = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    save_every: int | timedelta | None = None,
    log: Callable[[dict[str, float]], None] | None = None,
    log_every: int = 10,
    watch: Watch | None = None,
    on_trained: Callable[[Run], None] | None = None,
    cache: bool | str | os.PathLike[str] = True,
    progress: bool = True,
) -> nn.Module:
    """Fine-tune a model by a recipe, on one device, in a plain loop.

    Args:
        model: holding its pretrained weights, on the device to train on.
        recipe: the methods; ``Recipe()`` is plain fine-tuning.
        data: a dataset with a length and an index, or a DataLoader over one (its batch size and
            collate function are taken, its order is not).
        lr: the learning rate at its peak, unless the recipe says it.
        epochs, max_updates: how long; ``max_updates`` wins.
        batch_size, accumulate: an update is made from ``accumulate`` micro-batches of
            ``batch_size`` samples; how it is cut does not change the result (but for what is
            drawn or taken a micro-batch at a time: dropout, Mixout, FLOW's batch medians).
        weight_decay: of matrices, unless the recipe says it.
        schedule: a function (update, total updates) → factor of the learning rate, with updates
            counted from 0, such as :func:`~holdfast.optim.slanted_triangular`; None is constant.
        clip_norm: clip the gradient's norm to this.
        autocast: run the model in this dtype; torch.bfloat16 (float16 would need a GradScaler).
        task, collate, new, reference, rehearsal, cache: see :class:`~holdfast.run.Run`.
        seed: of the order of the data, of dropout and of what methods draw.
        checkpoint: a file to save the run's state in, and to go on from if it is there; the
            result is that of a run without a stop, to the bit.
        save_every: updates, or time, between saves; None saves about twenty times.
        log: called every ``log_every`` updates with ``update``, ``loss``, ``lr`` and what the
            methods have to tell: ``lam`` (λ), the ``pull``, penalties.
        on_trained: given the run when it is trained and nothing is merged yet.
        watch: figures of what is forgotten, at steps of its own, into the same log.
        progress: show progress bars.

    Returns:
        The model that stage 4 keeps: the given one, tuned in place (with LoRA: inside PEFT's).

    Example:
        >>> import torch, holdfast
        >>> model = torch.nn.Linear(4, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> recipe = holdfast.Recipe.preset("recadam+wise-ft")
        >>> model = holdfast.finetune_loop(
        ...     model, recipe, data, lr=1e-2, task="classification", progress=False
        ... )
    """
    if watch is not None and log is None:
        raise ValueError("what a watch sees goes into the log: pass log= as well")
    if autocast is torch.float16:
        raise ValueError("the loop has no GradScaler, which float16 needs: autocast=torch.bfloat16")
    was_training = model.training
    torch.manual_seed(seed)
    source = as_samples(data, collate, batch_size, model)
    run = Run(
        recipe, model, source.data, lr=lr, weight_decay=weight_decay, task=task,
        collate=source.collate, new=new, reference=reference, rehearsal=rehearsal, seed=seed,
        cache=cache, progress=progress,
    )  # fmt: skip
    updates = Updates(run, source.collate, source.batch_size, accumulate, seed)
    if max_updates is None:
        max_updates = math.ceil(above_zero("epochs", epochs) * updates.per_epoch)
    total = whole("max_updates", max_updates, 1)
    due = checkpoints.Due(-(-total // 20) if save_every is None else save_every, total)
    log_every = whole("log_every", log_every, 1)
    optimizer = run.make_optimizer(total)
    peaks = [group["lr"] for group in optimizer.param_groups]
    factors = [schedule(update, total) if schedule else 1.0 for update in range(total)]
    settings = {
        "updates": total, "lr": run.lr, "weight_decay": run.weight_decay, "clip_norm": clip_norm,
        "batch": source.batch_size * accumulate, "samples": len(run.criterion.data),
        "seed": seed, "schedule": factors,
    }  # fmt: skip
    done = checkpoints.load(checkpoint, run, settings) if checkpoint else 0

    device = next(run.model.parameters()).device
    precision = torch.autocast(device.type, dtype=autocast, enabled=autocast is not None)
    bar = progress_bar(total, "fine-tuning", shown=progress, unit="update")
    bar.update(done)
    run.model.train()
    optimizer.zero_grad()
    if log and watch and not done:
        log({"update": 0} | watch(0, run.model))
    try:
        for update in range(done + 1, total + 1):
            run.advance(update)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * factors[update - 1]
            batches = list(updates.batches(update))
            targets = updates.targets(batches)  # where they are: counting on a GPU takes longer
            losses = []
            for batch in (to_device(batch, device) for batch in batches):
                with precision:
                    loss = run.loss(batch, targets, update)
                loss.backward()
                losses.append(loss.detach())
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(run.model.parameters(), clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            bar.update(1)
            seen = watch(update, run.model) if watch else {}
            if log and (seen or update % log_every == 0 or update == total):
                rate = optimizer.param_groups[0]["lr"]
                values = {"update": update, "loss": float(sum(losses)), "lr": rate}
                log(values | run.log() | seen)
            if checkpoint and due(update):
                checkpoints.save(checkpoint, run, update, settings)
    except BaseException:
        recipe.trainable.finish(run.model)  # an interrupted run leaves a plain model behind
        raise
    finally:
        bar.close()
    if on_trained is not None:
        on_trained(run)
    return run.finish().train(was_training)
