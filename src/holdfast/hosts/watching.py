"""Measure a model while a host trains it, and log the values beside the loss.

    watch = Watch(model, text={"wikitext": text}, loader=Loader(tokenizer=tokenizer))  # first
    watch_trainer(trainer, watch)                       # any Hugging Face or TRL trainer
    Trainer(callbacks=[watch_lightning(watch, model)])  # Lightning
    accelerator.log(watch(update, loop.model), update)  # Accelerate, or your own loop

``finetune_loop`` takes ``watch=``. On several ranks, every rank runs the tests.
"""

from typing import Any, Protocol

from torch import nn

from holdfast._torch.imports import require

__all__ = ["Observer", "watch_lightning", "watch_trainer"]


class Observer(Protocol):
    """What a host calls during training; :class:`holdfast.Watch` is one.

    If it has a number ``target_loss``, of its last measurement, a run can stop early by it.
    """

    def __call__(self, update: int, model: nn.Module) -> dict[str, float]:
        """Return the values to log after an update, or an empty dict if none are due."""
        ...


def watch_trainer(trainer: Any, watch: Observer) -> None:
    """Log the values of a watch in a ``transformers.Trainer`` and its reporters.

    :func:`~holdfast.evaluate.watch.curves_of` finds the curves in ``trainer.state.log_history``,
    also after a resume.
    """
    transformers = require("transformers", extra="hf", what="watch_trainer")

    class Watching(transformers.TrainerCallback):  # type: ignore[misc, name-defined]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not state.global_step:
                self.on_step_end(args, state, control, **kwargs)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if seen := watch(state.global_step, kwargs.get("model") or trainer.model):
                due = control.should_log  # trainer.log resets it
                trainer.log(seen)
                control.should_log = due

    trainer.add_callback(Watching())


def watch_lightning(watch: Observer, model: nn.Module) -> Any:
    """Return a Lightning callback that logs the values of a watch of a model."""
    lightning = require("lightning.pytorch", extra="lightning", what="watch_lightning")

    class Watching(lightning.Callback):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.seen = 0

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            if trainer.global_step == self.seen:  # an update may take several batches
                return
            self.seen = trainer.global_step
            if values := watch(self.seen, model):
                for logger in trainer.loggers:  # log_dict would wait for log_every_n_steps
                    logger.log_metrics(values, step=self.seen)

    return Watching()
