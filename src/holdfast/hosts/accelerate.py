"""Recipes in a loop of one's own with Hugging Face Accelerate, on one process or many.

    accelerator = Accelerator(gradient_accumulation_steps=2)
    model.to(accelerator.device)
    run = Run(Recipe.preset("recadam+flow"), model, dataset, lr=2e-5)
    loop = AccelerateLoop(accelerator, run, epochs=3, batch_size=16)
    for update in loop:                # 1, 2, …; after accelerator.load_state, what is left
        loss = loop.backward()         # all micro-batches of the update
        accelerator.clip_grad_norm_(loop.model.parameters(), 1.0)
        loop.optimizer.step()
        loop.optimizer.zero_grad()
        if update % 100 == 0:
            accelerator.save_state("checkpoint")
    model = loop.finish()

It runs as it is under ``accelerate launch``: on one device, with DistributedDataParallel, with
FSDP2 (``FullyShardedDataParallelPlugin(fsdp_version=2)``) and with DeepSpeed's ZeRO
(``DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)``). What comes out does not depend on how an
update is cut into micro-batches and ranks.

Under DeepSpeed ``loop.backward()`` makes the step too, and gradients are clipped by the plugin's
``gradient_clipping``. Every rank loads the whole model before it is sharded, and has it whole again
after ``loop.finish()``. MoFO, HFT and gradual unfreezing are refused there.

FSDP1 is refused: its optimizer is given flat pieces of many parameters, of which a recipe cannot
tell the pretrained ones.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast._torch.batch import batch_length, normalized, to_device
from holdfast._torch.checks import above_zero, whole_number
from holdfast.hosts._checkpoints import check_settings
from holdfast.hosts._deepspeed import (
    ZeroOptimizer,
    check_deepspeed,
    settle_deepspeed,
    whole_model,
)
from holdfast.hosts._updates import labels_of, order_of, training_samples
from holdfast.hosts.raw import Schedule
from holdfast.io.files import write_whole
from holdfast.losses import count_targets
from holdfast.run import Run, same_run

try:
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, gather_object
except ImportError as error:
    raise ImportError('the Accelerate host needs accelerate: pip install "holdfast[hf]"') from error

__all__ = ["AccelerateLoop"]


class AccelerateLoop:
    """The updates of a run, for a loop with Accelerate.

    Args:
        accelerator: its ``gradient_accumulation_steps`` says how many micro-batches make an update.
        run: the recipe at work, with its data, made on every rank from the same pretrained weights;
            its model on ``accelerator.device``.
        epochs, max_updates: how long; ``max_updates`` wins.
        batch_size: the samples of one micro-batch on one rank.
        schedule: as for :func:`holdfast.finetune_loop`; None leaves the learning rate alone. (A
            scheduler that Accelerate has prepared steps once a rank.)
        seed: of the order of the data; None is the run's.
        workers: processes that read the data, on each rank.

    Attributes:
        model, optimizer: as ``accelerator.prepare`` returns them.
        done: the updates that are behind us.
        total_updates: those of the whole run.

    ``accelerator.save_state`` and ``load_state`` hold all that goes on after a stop, to the bit;
    a checkpoint of another recipe, other pretrained weights or other settings is refused. The
    number of ranks may change while an update has as many samples, but not under DeepSpeed.

    DistributedDataParallel needs ``DistributedDataParallelKwargs(find_unused_parameters=True)`` for
    methods that freeze parts for a while: gradual unfreezing, and HFT with several rounds.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> from holdfast import Recipe, Run
        >>> from holdfast.hosts.accelerate import AccelerateLoop
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> run = Run(
        ...     Recipe.preset("recadam"), torch.nn.Linear(4, 2), data, lr=1e-2,
        ...     task="classification", progress=False,
        ... )
        >>> loop = AccelerateLoop(Accelerator(cpu=True), run, batch_size=8)
        >>> for update in loop:
        ...     loss = loop.backward()
        ...     loop.optimizer.step()
        ...     loop.optimizer.zero_grad()
        >>> update
        4
        >>> model = loop.finish()
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: Run,
        *,
        epochs: float = 1.0,
        max_updates: int | None = None,
        batch_size: int = 16,
        schedule: Schedule | None = None,
        seed: int | None = None,
        workers: int = 0,
    ) -> None:
        _refuse_fsdp1(accelerator)
        self.zero = accelerator.distributed_type == DistributedType.DEEPSPEED
        if self.zero:
            check_deepspeed(accelerator, run)
        _check_ranks_agree(accelerator, run)
        self.accelerator, self.run = accelerator, run
        self.data, self.collate, batch_size = training_samples(run, batch_size)
        self.seed = run.seed if seed is None else seed
        self.workers = whole_number("workers", workers, 0)
        if self.zero:
            settle_deepspeed(accelerator, batch_size)
        self.accumulate: int = accelerator.gradient_accumulation_steps
        self.parts = self.accumulate * accelerator.num_processes
        self.batch = batch_size * self.parts
        self.per_epoch = math.ceil(len(self.data) / self.batch)
        if max_updates is None:
            max_updates = math.ceil(above_zero("epochs", epochs) * self.per_epoch)
        self.total_updates = whole_number("max_updates", max_updates, 1)
        self.done = 0

        optimizer = (ZeroOptimizer if self.zero else Run.make_optimizer)(run, self.total_updates)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.factors = (
            [schedule(t, self.total_updates) for t in range(self.total_updates)] if schedule else []
        )
        self.settings = {
            "updates": self.total_updates, "lr": run.lr, "weight_decay": run.weight_decay,
            "batch": self.batch, "samples": len(self.data), "seed": self.seed,
            "schedule": self.factors,
        }  # fmt: skip
        self.model, self.optimizer = accelerator.prepare(run.model, optimizer)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.take_over(self.optimizer.optimizer)
        self._batches: list[Any] = []
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def __len__(self) -> int:
        return self.total_updates - self.done

    def __iter__(self) -> Iterator[int]:
        """The numbers of the updates that are left, each when it is ready for :meth:`backward`."""
        first = self.done + 1
        self.model.train()
        self.optimizer.zero_grad()
        loader: Any = DataLoader(
            self.data,
            batch_sampler=self._rows(first),
            collate_fn=self.collate,
            num_workers=self.workers,
            generator=torch.Generator(),  # or it would draw from the one that dropout uses
        )
        batches = iter(loader)
        for update in range(first, self.total_updates + 1):
            self._batches = [
                to_device(normalized(batch), self.accelerator.device)
                for batch in itertools.islice(batches, self.accumulate)
            ]
            self.run.advance(update)
            if self.factors:
                for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                    group["lr"] = peak * self.factors[update - 1]
            yield update
            if self.done != update:
                raise RuntimeError(
                    f"update {update} was not made, or another state was loaded meanwhile: call "
                    "loop.backward() for each, and accelerator.load_state before the loop begins"
                )

    def backward(self) -> Tensor:
        """The gradients of the whole update, from all its micro-batches; returns its loss."""
        update = self.done + 1
        batches, self._batches = self._batches, []
        if not batches:
            raise RuntimeError("there is no update to make: call backward once in `for … in loop`")
        counted = self._counted(update)
        targets = self._targets(batches[:counted])
        total = torch.zeros((), device=self.accelerator.device)
        for number, batch in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                loss = self.run.criterion.loss(self.model, batch, targets, update)
                if number >= counted:
                    loss = loss * 0.0
                # Accelerate divides by it, and the loss is divided by all targets already.
                self.accelerator.backward(loss * self.accumulate)
            total = total + loss.detach()
        self.done = update
        reduced: Tensor = self.accelerator.reduce(total, "mean")
        return reduced

    def finish(self) -> nn.Module:
        """Stage 4: what is kept of the trained model, without what Accelerate put around it."""
        if self.zero:
            self.run.model = whole_model(self.model)
        else:
            self.run.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)
        return self.run.finish()

    def _rows(self, first: int) -> Iterator[list[int]]:
        """The samples of this rank, in micro-batches, from an update on.

        All ranks go through the model as often, or those who do would wait for the others: at the
        end of an epoch a rank may have to with a sample that does not count.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        drawn, order = -1, torch.empty(0, dtype=torch.int64)
        for update in range(first, self.total_updates + 1):
            epoch, number = divmod(update - 1, self.per_epoch)
            if epoch != drawn:
                drawn, order = epoch, order_of(epoch, len(self.data), self.seed)
            samples = order[number * self.batch : (number + 1) * self.batch]
            for part in samples.tensor_split(self.parts)[rank::world]:
                yield part.tolist() or samples[:1].tolist()

    def _counted(self, update: int) -> int:
        """How many micro-batches of this rank count."""
        samples = len(self.data) - (update - 1) % self.per_epoch * self.batch
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        return len(range(rank, min(samples, self.parts), world))

    def _targets(self, batches: list[Any]) -> Tensor:
        """What to divide by: as :func:`holdfast.losses.global_targets`, also for no micro-batch."""
        count = torch.zeros((), dtype=torch.int64, device=self.accelerator.device)
        for batch in batches:
            if isinstance(self.run.task, str):
                count += count_targets(labels_of(batch), self.run.task).sum()
            else:
                count += batch_length(batch)
        everyone: Tensor = self.accelerator.reduce(count, "sum")
        world: int = self.accelerator.num_processes
        return everyone.clamp(min=1).float() / world

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        """Beside what Accelerate saves; the state of a criterion is the rank's own."""
        state = {
            "run": self.run.identity(),
            "settings": self.settings,
            "update": self.done,
            "criterion": self.run.criterion.state_dict(),
        }
        file = Path(folder) / f"holdfast_{self.accelerator.process_index}.pt"
        write_whole(file, lambda path: torch.save(state, path))

    def _load(self, models: Any, folder: str) -> None:
        file = Path(folder) / f"holdfast_{self.accelerator.process_index}.pt"
        if not file.exists():  # there were fewer ranks
            file = Path(folder) / "holdfast_0.pt"
        if not file.exists():
            raise ValueError(f"{folder} is not a checkpoint of an AccelerateLoop: no {file.name}")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        self.run.check_identity(state["run"], folder)
        check_settings(state["settings"], self.settings, folder)
        self.run.criterion.load_state_dict(state["criterion"])
        self.done = state["update"]


def _refuse_fsdp1(accelerator: Accelerator) -> None:
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 gives the optimizer flat pieces of many parameters, of which a recipe cannot "
            "tell the pretrained ones. Shard with FSDP2 instead: "
            "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
        )


def _check_ranks_agree(accelerator: Accelerator, run: Run) -> None:
    first, *others = gather_object([run.identity()])
    if not all(same_run(first, other) for other in others):
        raise ValueError(
            "the ranks have another recipe, other data or other pretrained weights than rank 0. "
            "With FSDP, cpu_ram_efficient_loading loads them on rank 0 alone: set it to False"
        )
