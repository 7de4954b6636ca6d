"""Watch forgetting in the host that trains: the figures go into its log, beside the loss.

    watch = Watch(model, tokenizer=tokenizer, text={"wikitext": text}, every=100)  # first
    watch_trainer(trainer, watch)                       # Hugging Face and TRL, any trainer
    Trainer(callbacks=[watch_lightning(watch, model)])  # Lightning
    accelerator.log(watch(update, loop.model), update)  # Accelerate, or any loop of one's own

``finetune_loop`` takes it as ``watch=``. On several ranks every rank runs the tests.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from holdfast.evaluate.watch import Watch

__all__ = ["watch_lightning", "watch_trainer"]


def watch_trainer(trainer: Any, watch: Watch) -> None:
    """Have a ``transformers.Trainer`` log what a watch sees, so that its reporters show it.

    :func:`~holdfast.evaluate.watch.curves_of` finds the curves in ``trainer.state.log_history``,
    also after a resume.
    """
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Before the first update and after each."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.global_step:
                self.on_step_end(args, state, control, **kwargs)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if seen := watch(state.global_step, kwargs.get("model") or trainer.model):
                due = control.should_log  # a log of ours must not stand for the one that is due
                trainer.log(seen)
                control.should_log = due

    trainer.add_callback(Watching())


def watch_lightning(watch: Watch, model: nn.Module) -> Any:
    """A Lightning callback that logs what a watch sees of a model."""
    from lightning.pytorch import Callback

    class Watching(Callback):
        """After each update: a step may take several batches."""

        def __init__(self) -> None:
            self.seen = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == self.seen:
                return
            self.seen = trainer.global_step
            if values := watch(self.seen, model):
                for logger in trainer.loggers:  # now: log_dict would wait for log_every_n_steps
                    logger.log_metrics(values, step=self.seen)

    return Watching()
