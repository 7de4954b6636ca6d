"""Recipes in Lightning: a callback that a plain LightningModule asks for its loss and optimizer.

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

from holdfast._torch.batch import batch_length, inputs_and_labels, normalized
from holdfast._torch.checks import whole_number
from holdfast.columns import keeping, take_column
from holdfast.data import Collate
from holdfast.hosts._checkpoints import of_all_ranks, of_this_rank
from holdfast.hosts._updates import as_samples, order_of
from holdfast.hosts.raw import Schedule
from holdfast.losses import count_all
from holdfast.recipe import Recipe
from holdfast.run import Run

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as error:
    raise ImportError('this host needs Lightning: pip install "holdfast[lightning]"') from error

__all__ = ["RecipeCallback", "ResumableLoader"]


class RecipeCallback(Callback):
    """A recipe for a LightningModule, which hands it to Lightning in ``configure_callbacks``.

    Args:
        recipe: the methods. ``Recipe()`` is AdamW on the task's mean loss.
        model: holding its pretrained weights, also when a stopped run goes on: Lightning loads
            the tuned ones from ``ckpt_path`` itself. The module trains :attr:`model`.
        data: a dataset with a length and an index, or a DataLoader over one (of which the batch
            size and collate function are taken).
        collate, options: those of :class:`~holdfast.run.Run`: ``lr``, ``task``, ``new``, ``seed``…

    Stage 1 is done at once, stage 2 (scoring, cached) when ``fit`` begins, on its device. λ, the
    pull, the distance and the penalties are in Lightning's log. When ``fit`` ends, the model is the
    merged one; checkpoints hold what was trained. To merge another checkpoint than the last, load
    its weights into the module and call ``run.finish()`` again.

    Gradient accumulation is exact for every task: the gradient is that of the losses' sum over the
    number of targets of the whole update, also where micro-batches differ in size or tokens and
    where an epoch ends within an update. Lightning's mean of means is the same where all are equal,
    to the bit. The loss that Lightning shows is divided by the first micro-batch's targets.

    A run that goes on from ``ckpt_path`` ends as one without a stop, to the bit, if its data comes
    from :meth:`train_dataloader` (with several devices: if no dropout or the like is drawn). Not
    supported: ``automatic_optimization=False``, strategies that accumulate gradients themselves
    (DeepSpeed), weights made in ``configure_model``.

    Example:
        >>> from holdfast import Recipe
        >>> net = nn.Linear(4, 2)
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)
        >>> callback = RecipeCallback(Recipe(), net, data, lr=0.1, task="classification")
        >>> callback.model is net
        True
    """

    def __init__(
        self, recipe: Recipe, model: nn.Module, data: Any, *, collate: Collate | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        self._source = as_samples(data, collate, 16, model)
        self.run = Run(recipe, model, **options)
        self._trainer: Trainer | None = None
        self._loader: ResumableLoader | None = None
        self._saved: dict[str, Any] = {}  # what a checkpoint holds, until training begins
        self._finished = False
        self._update = 0  # the update that is being made, counted from 1
        self._labels: list[Tensor] = []  # of its micro-batches so far
        self._divisor: Tensor | None = None

    @property
    def model(self) -> nn.Module:
        """The model to train: the given one, or PEFT's around it."""
        return self.run.model

    def train_dataloader(
        self, batch_size: int | None = None, *, shuffle: bool = True, **options: Any
    ) -> ResumableLoader:
        """The data to train on, as the recipe's objective needs it.

        Args:
            batch_size: of a micro-batch, on one device; None is that of the DataLoader that the
                callback was given, or 16.
            shuffle: in an order of its own each epoch, which the seed alone determines.
            options: the DataLoader's own, such as ``num_workers`` and ``pin_memory``.

        A loader of your own reads ``run.criterion.data``, with
        ``keeping(collate, run.criterion.column)`` as its collate function.
        """
        trainer, criterion = self._in_fit(), self.run.criterion
        self._loader = ResumableLoader(
            criterion.data, self._source.batch_size if batch_size is None else batch_size,
            keeping(self._source.collate, criterion.column), seed=self.run.seed, shuffle=shuffle,
            epoch=trainer.current_epoch, rank=trainer.global_rank, ranks=trainer.world_size,
            **options,
        )  # fmt: skip
        return self._loader

    def configure_optimizers(self, schedule: Schedule | None = None) -> Any:
        """The recipe's optimizer, with its penalties, for the module's method of the same name.

        Args:
            schedule: as for :func:`~holdfast.finetune_loop`, such as
                :func:`~holdfast.optim.slanted_triangular`; None is constant.
        """
        total = self._in_fit().estimated_stepping_batches
        if not math.isfinite(total):
            raise ValueError("a recipe must know how long the run is: pass Trainer(max_epochs=...)")
        optimizer = self.run.make_optimizer(int(total))
        if schedule is None:
            return optimizer
        scheduler = LambdaLR(optimizer, lambda update: schedule(update, int(total)))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def loss(self, batch: Any) -> Tensor:
        """The recipe's loss of a micro-batch, to be returned by ``training_step``."""
        if not self._in_fit().training:
            raise ValueError("this is the loss to train on: validate and test with the task's own")
        batch = normalized(batch)
        self._labels.append(self._labels_of(batch))
        if self._divisor is None:
            self._divisor = count_all(self._labels, self.run.task)
        return self.run.loss(batch, self._divisor, self._update)

    def _labels_of(self, batch: Any) -> Tensor:
        if (column := self.run.criterion.column) is not None:
            batch, _ = take_column(batch, column)
        if not isinstance(self.run.task, str):  # a function of the user's: a target a sample
            return torch.empty(batch_length(batch))
        return inputs_and_labels(self.run.model, batch)[1]

    def _in_fit(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("the module's configure_callbacks() must return its RecipeCallback")
        return self._trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stage 2, at the pretrained weights: Lightning has not loaded a checkpoint yet."""
        if stage != "fit":
            return
        if self._finished:
            raise RuntimeError("this recipe's run is finished and merged: make a module anew")
        if all(part is not self.run.model for part in pl_module.modules()):
            name = type(pl_module).__name__
            raise ValueError(
                f"{name} does not hold the recipe's: write self.model = callback.model"
            )
        if not pl_module.automatic_optimization:
            raise ValueError("a recipe needs automatic_optimization=True")
        if trainer.strategy.handles_gradient_accumulation:
            name = type(trainer.strategy).__name__
            raise ValueError(f"{name} accumulates and divides gradients by itself: use another")
        if self._trainer is None:
            self.run.model.to(trainer.strategy.root_device)
            self.run.prepare_data(self._source.data, self._source.collate)
        self._trainer, self._update = trainer, 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the data and the random numbers of a checkpoint.

        Lightning itself loads a loader's state only if nobody asked for the run's length before.
        """
        if self.run.optimizer is None:
            raise ValueError(
                "the module's configure_optimizers must return self.holdfast.configure_optimizers()"
            )
        saved, self._saved = self._saved, {}
        if self._loader is not None and saved.get("loader"):
            self._loader.load_state_dict(saved["loader"])
        if saved and trainer.world_size == 1:  # those of rank 0 are not for the others
            torch.set_rng_state(saved["random"])
            if saved["random_cuda"] and torch.cuda.is_available():
                torch.cuda.set_rng_state(saved["random_cuda"][0])

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Stage 1 before each update."""
        update = trainer.global_step + 1
        if update != self._update:
            self._update, self._labels, self._divisor = update, [], None
            self.run.advance(update)

    @torch.no_grad()
    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Divide by all targets of the update; so far, by accumulate · the first batch's."""
        accumulate = trainer.accumulate_grad_batches
        if self._divisor is None or accumulate == 1 == len(self._labels):
            return
        targets = count_all(self._labels, self.run.task)
        factor = accumulate * float(self._divisor) / float(targets)
        if factor != 1:
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if p.grad is not None:
                    p.grad.mul_(factor)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log where the methods stand."""
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if step == self._update and every and step % every == 0:
            pl_module.log_dict(self.run.log(distance=True), on_step=True, on_epoch=False)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stage 4, after the last checkpoint was written."""
        self._finished = True
        self.run.finish()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside weights, optimizer and loops."""
        return {
            "run": self.run.identity(),
            "criteria": of_all_ranks(self.run.criterion.state_dict()),
            "loader": self._loader.state_dict() if self._loader is not None else {},
            "random": torch.get_rng_state(),
            "random_cuda": [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [],
        }

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        """Go on from a checkpoint of the same recipe and pretrained weights, and from no other."""
        if trainer.state.fn != "fit":  # to test any weights is no harm
            return
        saved = checkpoint["callbacks"].get(self.state_key)
        if saved is None:
            raise ValueError(f"{trainer.ckpt_path} is of a run without a recipe: go on as it began")
        self.run.check_identity(saved["run"], str(trainer.ckpt_path))
        self.run.criterion.load_state_dict(of_this_rank(saved["criteria"]))
        self._saved = saved


class ResumableLoader:
    """Batches in an order that the seed and the epoch determine, each rank its share of them."""

    def __init__(
        self, data: Any, batch_size: int, collate: Collate, *, seed: int, shuffle: bool,
        epoch: int = 0, rank: int = 0, ranks: int = 1, **options: Any,
    ) -> None:  # fmt: skip
        self.data, self.collate, self.options = data, collate, options
        self.batch_size = whole_number("batch_size", batch_size, 1)
        self.seed, self.shuffle, self.rank, self.ranks = seed, shuffle, rank, ranks
        self.epoch, self.position, self._goes_on = epoch, 0, False

    def __len__(self) -> int:
        return math.ceil(math.ceil(len(self.data) / self.ranks) / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self.position and not self._goes_on:  # the epoch before was cut short
            self.epoch, self.position = self.epoch + 1, 0
        self._goes_on = False
        batches = [rows.tolist() for rows in self._order().split(self.batch_size)]
        # A generator of its own: the loader draws from it, and must not from torch's global one.
        loader: DataLoader[Any] = DataLoader(
            self.data, batch_sampler=batches[self.position :], collate_fn=self.collate,
            generator=torch.Generator().manual_seed(self.seed), **self.options,
        )  # fmt: skip
        for batch in loader:
            self.position += 1
            if self.position == len(batches):  # before it is read: Lightning asks for no more
                self.epoch, self.position = self.epoch + 1, 0
            yield batch

    def _order(self) -> Tensor:
        n = len(self.data)
        order = order_of(self.epoch, n, self.seed) if self.shuffle else torch.arange(n)
        share = math.ceil(n / self.ranks)
        return order.repeat(self.ranks)[: share * self.ranks][self.rank :: self.ranks]

    def state_dict(self) -> dict[str, int]:
        """Where it stands."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from there."""
        self.epoch, self.position, self._goes_on = state["epoch"], state["position"], True
