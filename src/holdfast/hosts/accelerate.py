"""Recipes in your own loop with Hugging Face Accelerate, on one process or many.

The same script runs under ``accelerate launch``: on one device, with DistributedDataParallel, with
FSDP2 (``FullyShardedDataParallelPlugin(fsdp_version=2)``) and with DeepSpeed's ZeRO
(``DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False)``). The result does not depend on the split
of an update into micro-batches and ranks.

Under DeepSpeed, ``loop.backward()`` also makes the step, and the plugin's ``gradient_clipping``
clips gradients. Every rank loads the whole model before it is sharded, and has it whole again after
``loop.finish()``. Methods that compare weights with each other, or freeze parts for a while, are
refused. FSDP1 is refused: it gives the optimizer flat pieces of many parameters, in which a recipe
cannot find the pretrained ones.
"""

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from holdfast._torch.batch import normalized, to_device
from holdfast._torch.checks import named_settings, whole_number
from holdfast._torch.imports import require
from holdfast.hosts._checkpoints import STATE_FILE, check_settings, load_run_state, run_state
from holdfast.hosts._deepspeed import ZeroOptimizer, check_deepspeed, settle_deepspeed, whole_model
from holdfast.hosts._updates import Schedule, Updates, labels_of, schedule_for, source_of
from holdfast.io.files import write_whole
from holdfast.losses import count_all
from holdfast.run import Run, same_run

require("accelerate", extra="hf", what="The Accelerate host")
from accelerate import Accelerator, DistributedDataParallelKwargs  # noqa: E402
from accelerate.state import AcceleratorState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    DistributedType,
    GradientAccumulationPlugin,
    gather_object,
)

__all__ = ["AccelerateLoop"]


def make_accelerator(model: nn.Module, accumulate: int) -> Accelerator:
    """The accelerator of a model that is on its device, as the launcher has configured it."""
    AcceleratorState._reset_state()  # a trainer may have set another precision in this process
    # Some parameters may get no gradient for a while, or at all, such as those of a pooler.
    find = {"find_unused_parameters": True}
    accelerator = Accelerator(
        device_placement=False,
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=accumulate),
        kwargs_handlers=[DistributedDataParallelKwargs(**find)],
    )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "finetune does not train with DeepSpeed: shard the model with FSDP2 (accelerate launch "
            "--use_fsdp --fsdp_version 2), or write a loop with AccelerateLoop"
        )
    asked = os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    if asked and getattr(model, "is_quantized", False):
        raise ValueError(
            "a quantized model is not sharded: launch without --use_fsdp, so that each process has "
            "all of it, or train without load_in_4bit and load_in_8bit"
        )
    if asked and accelerator.distributed_type != DistributedType.FSDP:
        raise ValueError(
            "Accelerate shards only over several GPUs: launch without --use_fsdp, for "
            "DistributedDataParallel"
        )
    return accelerator


def autocast_of(
    accelerator: Accelerator, precision: str, device: torch.device
) -> torch.dtype | None:
    """The dtype in which a model runs, from ``Training.precision`` and Accelerate's own setting."""
    mixed = accelerator.mixed_precision
    if mixed not in ("no", "bf16") or (mixed == "bf16" and precision == "float32"):
        raise ValueError(
            f"Accelerate is set to mixed_precision={mixed}, but precision is {precision}: launch "
            "with --mixed_precision bf16 or no"
        )
    is_auto = precision == "auto" and device.type == "cuda"
    is_half = is_auto or mixed == "bf16" or precision == "bfloat16"
    return torch.bfloat16 if is_half else None


class AccelerateLoop:
    """The updates of a run, for a loop with Accelerate.

    Args:
        accelerator: its ``gradient_accumulation_steps`` is the number of micro-batches per update.
        run: a run with its data, built on every rank from the same pretrained weights, with its
            model on ``accelerator.device``. The model also runs in ``run.autocast``, if that is
            ``torch.bfloat16``, without ``mixed_precision`` of the accelerator.
        epochs, max_updates: the length of the run; ``max_updates`` overrides ``epochs``.
        batch_size: samples per micro-batch and rank.
        schedule: as in :class:`~holdfast.LoopSettings`. (A scheduler that Accelerate has prepared
            steps once per rank.)
        seed: the seed of the data order. If None, the run's seed is used.
        workers: processes per rank that read the data.

    Attributes:
        model, optimizer: as ``accelerator.prepare`` returns them.
        done: the number of finished updates.
        total_updates: the number of updates of the whole run.

    ``accelerator.save_state`` and ``load_state`` hold the whole state: a resumed run is
    bit-identical to an uninterrupted one. A checkpoint of another recipe, other pretrained weights
    or other settings is an error. The number of ranks may change if the samples per update stay the
    same, except under DeepSpeed.

    DistributedDataParallel needs ``DistributedDataParallelKwargs(find_unused_parameters=True)`` for
    methods that freeze parts for a while.

    Example:
        >>> import torch
        >>> from accelerate import Accelerator
        >>> data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
        >>> options = {"lr": 1e-2, "task": "classification", "progress": False}
        >>> run = Run("recadam", torch.nn.Linear(4, 2), data, **options)
        >>> loop = AccelerateLoop(Accelerator(cpu=True), run, batch_size=8)
        >>> for update in loop:
        ...     loss = loop.backward()
        ...     loop.optimizer.step()
        ...     loop.optimizer.zero_grad()
        >>> update
        4
        >>> model = loop.finish()
    """

    @named_settings
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
        self.accelerator, self.run = accelerator, run
        self.zero = accelerator.distributed_type == DistributedType.DEEPSPEED
        self._check()
        source = source_of(run, batch_size)
        self.workers = whole_number("workers", workers, 0)
        if self.zero:
            settle_deepspeed(accelerator, source.batch_size)
        self.accumulate: int = accelerator.gradient_accumulation_steps
        self.parts = self.accumulate * accelerator.num_processes
        self.updates = Updates(
            source, self.parts, run.seed if seed is None else seed, epochs=epochs,
            max_updates=max_updates, schedule=schedule_for(run, schedule),
        )  # fmt: skip
        self.total_updates = self.updates.total
        self.done = 0

        optimizer = (ZeroOptimizer if self.zero else Run.make_optimizer)(run, self.total_updates)
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.settings = self.updates.settings(run)
        self.model, self.optimizer = accelerator.prepare(run.model, optimizer)
        if isinstance(optimizer, ZeroOptimizer):
            optimizer.take_over(self.optimizer.optimizer)
        self.device = accelerator.device
        if accelerator.num_processes == 1:  # the user may have chosen another device
            self.device = next(self.model.parameters()).device
        self._batches: list[Any] = []
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._load)

    def _check(self) -> None:
        """Raise ValueError if Accelerate is set up in a way that a recipe cannot work with."""
        kind = self.accelerator.distributed_type
        if kind == DistributedType.FSDP and not self.accelerator.is_fsdp2:
            raise ValueError(
                "FSDP1 gives the optimizer flat pieces of many parameters, in which a recipe "
                "cannot find the pretrained ones. Shard with FSDP2 instead: "
                "Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))"
            )
        mixed = {"bf16": torch.bfloat16, "fp16": torch.float16}
        autocast = mixed.get(self.accelerator.mixed_precision)
        is_ours = autocast is None and self.run.autocast is torch.bfloat16
        if self.run.recall.has_data and autocast != self.run.autocast and not is_ours:
            raise ValueError(
                f"Accelerate trains with mixed_precision={self.accelerator.mixed_precision!r}, but "
                f"the predictions that the recipe keeps were made with autocast="
                f"{self.run.autocast}: build the run with Run(autocast={autocast})"
            )
        if self.zero:
            check_deepspeed(self.accelerator, self.run)
        first, *others = gather_object([self.run.identity()])
        if not all(same_run(first, other) for other in others):
            raise ValueError(
                "the ranks differ in their recipe, data or pretrained weights. With FSDP, "
                "cpu_ram_efficient_loading loads the weights on rank 0 only: set it to False"
            )

    def __len__(self) -> int:
        return self.total_updates - self.done

    def __iter__(self) -> Iterator[int]:
        """Yield the number of each remaining update when it is ready for :meth:`backward`."""
        first = self.done + 1
        self.model.train()
        self.optimizer.zero_grad()
        loader: Any = DataLoader(
            self.updates.data,
            batch_sampler=self._rows(first),
            collate_fn=self.updates.collate,
            num_workers=self.workers,
            generator=torch.Generator(),  # so that it does not draw from dropout's
        )
        batches = iter(loader)
        for update in range(first, self.total_updates + 1):
            each = len(self._share(update))
            self._batches = [normalized(batch) for batch in itertools.islice(batches, each)]
            self.run.advance(update)
            if self.updates.factors:
                for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
                    group["lr"] = peak * self.updates.factors[update - 1]
            yield update
            if self.done != update:
                raise RuntimeError(
                    f"update {update} was not made, or another state was loaded meanwhile: call "
                    "loop.backward() in each iteration, and load_state before the loop"
                )

    def backward(self) -> Tensor:
        """Compute the gradients of all micro-batches of the update.

        Return the loss of its samples, without what a recall adds for data of its own.
        """
        update = self.done + 1
        batches, self._batches = self._batches, []
        if not batches:
            raise RuntimeError("no update is due: call backward once per iteration")
        counted = sum(len(rows) > 0 for rows in self._share(update))
        labels = [labels_of(batch, self.run.task) for batch in batches]
        if self.accelerator.num_processes > 1:  # some backends reduce no tensors of the CPU
            labels = [some.to(self.device) for some in labels]
        targets = count_all(labels[:counted] or [labels[0][:0]], self.run.task)
        total = torch.zeros((), device=self.device)
        recall = self.run.recall
        is_half = self.run.autocast is torch.bfloat16  # float16 needs the scaler of Accelerate
        precision = torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=is_half)
        samples = self.run.update_size or self.updates.size  # a row may hold several
        recall.plan(self.model, update, samples, len(batches))
        self.accelerator.step = self.accumulate - len(batches)  # the last one synchronizes
        for number, batch in enumerate(batches):
            with self.accelerator.accumulate(self.model):
                with precision, recall.beside(self.model) as recalled:
                    moved = to_device(batch, self.device)
                    loss = self.run.criterion.loss(self.model, moved, targets, update)
                    if number >= counted:
                        loss = loss * 0.0
                    whole = loss + recalled()
                self.run.observe(whole)
                # Accelerate divides by it, but the loss is already divided by all targets.
                self.accelerator.backward(whole * self.accumulate)
            total = total + loss.detach()
        self.done = update
        reduced: Tensor = self.accelerator.reduce(total, "mean")
        return reduced

    def unwrap(self) -> None:
        """Take Accelerate's wrapper off the run's model."""
        if self.zero:
            self.run.model = whole_model(self.model)
        else:
            self.run.model = self.accelerator.unwrap_model(self.model, keep_fp32_wrapper=False)

    def finish(self) -> nn.Module:
        """Stage 4: merge, and return the model without Accelerate's wrapper."""
        self.unwrap()
        return self.run.finish()

    def _share(self, update: int) -> tuple[Tensor, ...]:
        """The samples of this rank's micro-batches, the last one perhaps empty.

        All ranks have the same number, which is smaller at the end of an epoch.
        """
        rows, ranks = self.updates.rows(update), self.accelerator.num_processes
        parts: tuple[Tensor, ...] = rows.split(self.updates.batch_size)
        each = self.accumulate if self.zero else -(-len(parts) // ranks)  # DeepSpeed counts them
        own = parts[self.accelerator.process_index :: ranks]
        return own + (rows[:0],) * (each - len(own))

    def _rows(self, first: int) -> Iterator[list[int]]:
        """The samples of this rank's micro-batches, starting with an update.

        All ranks must run the model equally often, or some would wait forever. In place of an
        empty micro-batch, a rank runs a sample that does not count.
        """
        for update in range(first, self.total_updates + 1):
            for rows in self._share(update):
                yield rows.tolist() or self.updates.rows(update)[:1].tolist()

    def _save(self, models: Any, weights: Any, folder: str) -> None:
        state = run_state(self.run) | {"settings": self.settings, "update": self.done}
        if self.accelerator.is_local_main_process:  # nodes may have disks of their own
            write_whole(Path(folder) / STATE_FILE, lambda path: torch.save(state, path))

    def _load(self, models: Any, folder: str) -> None:
        file = Path(folder) / STATE_FILE
        if not file.exists():
            raise ValueError(f"{folder} is not a checkpoint of an AccelerateLoop: no {file.name}")
        state: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
        load_run_state(self.run, state, folder)
        check_settings(state["settings"], self.settings, folder)
        self.done = state["update"]
