"""Recipes in Lightning: a callback gives a LightningModule its data, loss and optimizer.

class Mine(LightningModule):
    def __init__(self, recipe, pretrained, dataset):
        super().__init__()
        self.holdfast = RecipeCallback(recipe, pretrained, dataset, lr=1e-3, task="classification")
        self.model = self.holdfast.model

    def configure_callbacks(self): return [self.holdfast]
    def train_dataloader(self): return self.holdfast.train_dataloader(batch_size=32)
    def training_step(self, batch, batch_idx): return self.holdfast.loss(batch)
    def configure_optimizers(self): return self.holdfast.configure_optimizers()

Trainer(max_epochs=3).fit(Mine(Recipe.preset("recadam+flow"), pretrained, dataset))
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

from holdfast._torch.batch import batch_length, normalized
from holdfast._torch.checks import whole_number
from holdfast._torch.imports import require
from holdfast.columns import keeping
from holdfast.data import Collate
from holdfast.hosts._checkpoints import load_run_state, run_state
from holdfast.hosts._updates import (
    CLIP_NORM,
    Schedule,
    as_samples,
    labels_of,
    order_of,
    schedule_for,
)
from holdfast.losses import count_all
from holdfast.recipe import Recipe
from holdfast.run import Run
from holdfast.stages import TrainingSize

require("lightning.pytorch", extra="lightning", what="The Lightning host")
from lightning.pytorch import Callback, LightningModule, Trainer  # noqa: E402

__all__ = ["RecipeCallback", "ResumableLoader"]


class RecipeCallback(Callback):
    """A recipe for a LightningModule, whose ``configure_callbacks`` must return it.

    Args:
        recipe: the methods, or the name of a preset. ``Recipe()`` is AdamW on the mean loss.
        model: the model with its pretrained weights, also for a resume: Lightning itself loads
            the tuned weights from ``ckpt_path``. The module trains :attr:`model`.
        data: a dataset with a length and an index, or a DataLoader over one, whose batch size and
            collate function are used.
        collate, options: options of :class:`~holdfast.run.Run`, such as ``lr`` and ``task``.

    Stage 1 runs at once, stage 2 (scoring, cached) at the start of ``fit``, on its device. λ, the
    pull, the distance and the penalties are in Lightning's log. After ``fit`` the model is the
    merged one; checkpoints hold the trained weights. To merge an earlier checkpoint, load its
    weights into the module and call ``run.finish()`` again.

    Gradient accumulation is exact for every task: the losses are summed and divided by the number
    of targets of the whole update, even if micro-batches differ in size or an epoch ends within an
    update. With equal micro-batches this is bit-identical to Lightning's mean of means. The loss
    that Lightning shows is divided by the targets of the first micro-batch.

    A run that resumes from ``ckpt_path`` is bit-identical to an uninterrupted one if its data comes
    from :meth:`train_dataloader` (on several devices: without dropout). Not supported:
    ``automatic_optimization=False``, strategies that accumulate gradients themselves (DeepSpeed),
    weights created in ``configure_model``.

    Example:
        >>> from holdfast import Recipe
        >>> net = nn.Linear(4, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
        >>> callback = RecipeCallback(Recipe(), net, data, lr=0.1, task="classification")
        >>> callback.model is net
        True
    """

    def __init__(
        self, recipe: Recipe | str, model: nn.Module, data: Any, *,
        collate: Collate | None = None, **options: Any,
    ) -> None:  # fmt: skip
        self._source = as_samples(data, collate, 16, model)
        size = TrainingSize.of(len(self._source.data), options.get("visits"))
        self.run = Run(recipe, model, **{"size": size} | options)
        self._trainer: Trainer | None = None
        self._loader: ResumableLoader | None = None
        self._saved: dict[str, Any] = {}  # a loaded checkpoint, until training starts
        self._finished = False
        self._update = 0  # the current update, counted from 1
        self._labels: list[Tensor] = []  # of its micro-batches
        self._divisor: Tensor | None = None
        self._losses: list[Tensor] = []  # likewise, as Lightning gets them
        self._is_last = False  # whether this micro-batch is its last one

    @property
    def model(self) -> nn.Module:
        """The model to train: the given one, or PEFT's around it."""
        return self.run.model

    def train_dataloader(
        self, batch_size: int | None = None, *, shuffle: bool = True, **options: Any
    ) -> ResumableLoader:
        """The training data, with the columns that the recipe needs.

        Args:
            batch_size: samples per micro-batch and device. If None, the batch size of the
                DataLoader that the callback was given, or 16.
            shuffle: shuffle each epoch; the seed determines the order.
            options: options of the DataLoader, such as ``num_workers`` and ``pin_memory``.

        Your own loader must read ``run.criterion.data``, with
        ``keeping(collate, *run.criterion.columns)`` as its collate function.
        """
        trainer, criterion = self._in_fit(), self.run.criterion
        self._loader = ResumableLoader(
            criterion.data, self._source.batch_size if batch_size is None else batch_size,
            keeping(self._source.collate, *criterion.columns), seed=self.run.seed, shuffle=shuffle,
            epoch=trainer.current_epoch, rank=trainer.global_rank, ranks=trainer.world_size,
            **options,
        )  # fmt: skip
        return self._loader

    def configure_optimizers(self, schedule: Schedule | None = None) -> Any:
        """The recipe's optimizer with its penalties, for the module's method of the same name.

        Args:
            schedule: as in :class:`~holdfast.LoopSettings`.
        """
        total = self._in_fit().estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError("a recipe needs the length of the run: pass Trainer(max_epochs=...)")
        optimizer = self.run.make_optimizer(int(total))
        if (schedule := schedule_for(self.run, schedule)) is None:
            return optimizer
        scheduler = LambdaLR(optimizer, lambda update: schedule(update, int(total)))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def loss(self, batch: Any) -> Tensor:
        """The recipe's loss of a micro-batch; return it from ``training_step``."""
        if not self._in_fit().training:
            raise ValueError("this loss is for training only: validate and test with your own loss")
        batch = normalized(batch)
        self._labels.append(labels_of(batch, self.run.task))
        if self._divisor is None:
            self._divisor = count_all(self._labels, self.run.task)
        model, criterion = self.run.model, self.run.criterion
        if not self._is_last:
            loss = criterion.loss(model, batch, self._divisor, self._update)
        else:
            # Lightning divides by the number of micro-batches, and the step multiplies by the
            # factor.
            scale = self._in_fit().accumulate_grad_batches / self._factor()
            with self.run.recall.beside(model) as recalled:
                loss = criterion.loss(model, batch, self._divisor, self._update)
                loss = loss + scale * recalled()
        self._losses.append(loss.detach())
        return loss

    def _factor(self) -> float:
        """The factor that :meth:`on_before_optimizer_step` applies to the gradients."""
        accumulate = self._in_fit().accumulate_grad_batches
        if self._divisor is None or accumulate == 1 == len(self._labels):
            return 1.0
        targets = count_all(self._labels, self.run.task)
        return accumulate * float(self._divisor) / float(targets)

    def _in_fit(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the module's configure_callbacks() must return its RecipeCallback")
        return self._trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stage 2 at the pretrained weights: Lightning loads a checkpoint later."""
        if stage != "fit":
            return
        if self._finished:
            raise RuntimeError("this run is finished and its model merged: build a new module")
        if all(part is not self.run.model for part in pl_module.modules()):
            name = type(pl_module).__name__
            raise ValueError(
                f"{name} does not hold the recipe's model: write self.model = callback.model"
            )
        if not pl_module.automatic_optimization:
            raise ValueError("a recipe needs automatic_optimization=True")
        if trainer.strategy.handles_gradient_accumulation:
            name = type(trainer.strategy).__name__
            raise ValueError(f"{name} accumulates gradients by itself: use another strategy")
        if self._trainer is None:
            self.run.model.to(trainer.strategy.root_device)
            size = self._source.batch_size * trainer.accumulate_grad_batches * trainer.world_size
            lengths = [
                (trainer.max_epochs or 0) * len(self._source.data), trainer.max_steps * size,
            ]  # fmt: skip
            if self.run.visits is None:  # Lightning says -1 for no limit
                self.run.visits = min((n for n in lengths if n > 0), default=None)
            self.run.update_size = self.run.update_size or size
            mixed = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
            self.run.autocast = mixed.get(trainer.precision)
            self.run.prepare_data(self._source.data, self._source.collate)
        if self.run.needs_warm_up and trainer.gradient_clip_val is None:
            trainer.gradient_clip_val = CLIP_NORM
        self._trainer, self._update = trainer, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the position in the data and the RNG states of a checkpoint.

        Lightning restores a loader only if the length of the run was not asked for before.
        """
        if self.run.optimizer is None:
            raise ValueError(
                "the module's configure_optimizers must return self.holdfast.configure_optimizers()"
            )
        saved, self._saved = self._saved, {}
        if self._loader is not None and saved.get("loader"):
            self._loader.load_state_dict(saved["loader"])
        if saved and trainer.world_size == 1:  # those of rank 0 are not for other ranks
            torch.set_rng_state(saved["random"])
            if saved["random_cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state(saved["random_cuda"][0])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        update = trainer.global_step + 1
        if update != self._update:
            self._update, self._labels, self._divisor, self._losses = update, [], None, []
            self.run.advance(update)
        accumulate = trainer.accumulate_grad_batches
        self._is_last = len(self._labels) + 1 == accumulate or trainer.is_last_batch
        if self._is_last:  # only now, the factor of the gradients is known
            # Not within the step, which Lightning calls with a closure: a recall may set its rate.
            rows = getattr(trainer.train_dataloader, "batch_size", None) or batch_length(batch)
            samples = rows * accumulate * trainer.world_size
            self.run.recall.plan(self.run.model, update, samples, micro_batches=1)

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Divide by all targets of the update instead of accumulate × those of the first batch."""
        factor = self._factor()
        for loss in self._losses:
            self.run.observe(loss * (factor / trainer.accumulate_grad_batches))
        if factor != 1:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.mul_(factor)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._update and every and step % every == 0:
            pl_module.log_dict(self.run.log(distance=True), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stage 4, after the last checkpoint is written."""
        self._finished = True
        self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {
            **run_state(self.run),
            "loader": self._loader.state_dict() if self._loader is not None else {},
            "random": torch.get_rng_state(),
            "random_cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":  # any weights may be tested
            return
        saved = checkpoint["callbacks"].get(self.state_key)
        if saved is None:
            raise ValueError(
                f"{trainer.ckpt_path} was saved by a run without a recipe: resume it without one"
            )
        load_run_state(self.run, saved, str(trainer.ckpt_path))
        self._saved = saved


class ResumableLoader:
    """Batches of this rank, in an order that depends only on the seed and the epoch."""

    def __init__(
        self, data: Any, batch_size: int, collate: Collate, *, seed: int, shuffle: bool,
        epoch: int = 0, rank: int = 0, ranks: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        self.data, self.collate, self.options = data, collate, options
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed, self.shuffle, self.rank, self.ranks = seed, shuffle, rank, ranks
        self.epoch, self.position, self._resumed = epoch, 0, False

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.data) / self.ranks) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._resumed:  # the previous epoch was cut short
            self.epoch, self.position = self.epoch + 1, 0
        self._resumed = False
        batches = [rows.tolist() for rows in self._order().split(self.batch_size)]
        # Its own generator, so that the loader does not draw from torch's global one.
        loader: DataLoader[Any] = DataLoader(
            self.data, batch_sampler=batches[self.position :], collate_fn=self.collate,
            generator=torch.Generator().manual_seed(self.seed), **self.options,
        )  # fmt: skip
        for batch in loader:
            self.position += 1
            if self.position == len(batches):  # before yielding: Lightning asks for no more
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def _order(self) -> Tensor:
        n = len(self.data)
        order = order_of(self.epoch, n, self.seed) if self.shuffle else torch.arange(n)
        share = math.ceil(n / self.ranks)
        return order.repeat(self.ranks)[: share * self.ranks][self.rank :: self.ranks]

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.epoch, self.position, self._resumed = state["epoch"], state["position"], True
