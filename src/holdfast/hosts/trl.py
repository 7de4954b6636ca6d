"""Recipes in TRL's SFTTrainer.

    trainer = HoldfastSFTTrainer(
        model=model, recipe=recipe, args=SFTConfig(...), train_dataset=dataset
    )

Conversations, prompts with completions and plain text, completion-only loss, packing, padding-free
batches and PEFT configurations are TRL's own; the recipe's weights reach the right tokens.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast._torch.rng import seeded
from holdfast.columns import keeping, take_column
from holdfast.data import pad_collate
from holdfast.hosts.hf import WithRecipe
from holdfast.recipe import Recipe
from holdfast.stages import Criterion

try:
    from transformers import Trainer
    from trl.data_utils import pack_dataset
    from trl.trainer.sft_config import SFTConfig
    from trl.trainer.sft_trainer import SFTTrainer
except ImportError as error:
    raise ImportError('this host needs TRL: pip install "holdfast[trl]"') from error

__all__ = ["HoldfastSFTTrainer"]


class HoldfastSFTTrainer(WithRecipe, SFTTrainer):
    """TRL's SFTTrainer with a recipe.

    Args:
        recipe, new, reference, rehearsal: see :class:`~holdfast.hosts.hf.WithRecipe`.
        args, kwargs: SFTTrainer's own. Adapters come from the recipe, ``trainable=LoRA(...)``, or
            from ``peft_config=``.

    Samples are scored as TRL has tokenised and cut them, and packed afterwards, so that each token
    carries the weight of its own sample.
    """

    def __init__(self, *args: Any, recipe: Recipe, **kwargs: Any) -> None:
        peft_config = kwargs.pop("peft_config", None)
        if peft_config is not None:  # before the recipe looks at the model
            import peft

            if recipe.trainable.keeps_base:
                raise ValueError(
                    f"the recipe's {type(recipe.trainable).__name__} and peft_config are two sets "
                    "of adapters: pass one of them"
                )
            model = args[0] if args else kwargs.pop("model")
            settings = args[1] if len(args) > 1 else kwargs.get("args")
            with seeded(getattr(settings, "seed", 42)):  # the same A on every rank
                args = (peft.get_peft_model(model, peft_config), *args[1:])
        self._reads_data = recipe.reads_data
        self._seen_training_data = False
        self._packs_later = False
        if reason := recipe.objective.packing_conflict():
            raise ValueError(reason)
        super().__init__(*args, recipe=recipe, **kwargs)

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """TRL's own; what the recipe looks at is packed after it has been looked at."""
        first = not hasattr(self, "train_dataset") and not self._seen_training_data
        if dataset_name == "train" and first:  # TRL's first call; eval data may be called so too
            self._seen_training_data = True
            if packing and self._reads_data:
                self._packs_later, packing = True, False
                args = copy.copy(args)
                args.truncation_mode = "keep_start"  # as packing does it
                if args.packing_strategy != "bfd":  # the others cut nothing off
                    args.max_length = None
        return super()._prepare_dataset(
            dataset, processing_class, args, packing, formatting_func, dataset_name
        )

    def _prepare_data(self) -> None:
        collator: Any = self.data_collator
        pad = _Pad(getattr(collator, "pad_token_id", 0))
        if self.run.rehearsal is not None:
            prepare: Any = super()._prepare_dataset
            self.run.rehearsal = prepare(
                self.run.rehearsal, self.processing_class, self.args, False,
                getattr(self, "_formatting_func", None), "rehearsal",
            )  # fmt: skip
        self.run.prepare_data(self.train_dataset, pad if self._reads_data else collator)
        criterion, args = self.run.criterion, cast(SFTConfig, self.args)
        self._refuse_second_losses()
        if type(criterion) is not Criterion and args.loss_type != "nll":
            raise ValueError(
                f"the recipe's objective and loss_type={args.loss_type!r} are two losses: set "
                'loss_type="nll"'
            )
        data, column = criterion.data, criterion.column
        if column is not None:
            data = data.map(_to_tokens, fn_kwargs={"column": column})
            self.data_collator = keeping(collator, column, optional=True)
        if self._packs_later:
            data = data.select_columns(["input_ids", "labels", *([column] if column else [])])
            data = pack_dataset(data, cast(int, args.max_length), args.packing_strategy)
        self.train_dataset = data

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if _only_weighs(self.run.criterion):  # the loss is TRL's own, and so is the count
            return Trainer._get_num_items_in_batch(self, batch_samples, device)
        return super()._get_num_items_in_batch(batch_samples, device)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """TRL's loss, with the weights of the recipe; of other objectives the recipe's loss."""
        criterion = self.run.criterion
        weighs = _only_weighs(criterion) and type(criterion) is not Criterion
        if not (weighs and model.training):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        inputs, values = take_column(inputs, str(criterion.column))
        weights = criterion.weights(model, inputs, values, self.state.global_step + 1)
        with _weighing(model, weights):
            trl: Any = SFTTrainer.compute_loss
            return trl(self, model, inputs, return_outputs, num_items_in_batch)

    def _share_of_auxiliary(self) -> float:
        """As TRL's own loss has it: the mean over micro-batches and ranks."""
        return 1.0 / self.current_gradient_accumulation_steps


@contextlib.contextmanager
def _weighing(model: nn.Module, weights: Tensor | None) -> Iterator[None]:
    """Let the log-probabilities that TRL's fused head returns count by the weights of their tokens.

    The head returns those of labels[:, 1:]; all that TRL measures beside the loss stays as it is.
    """

    def weigh(_: nn.Module, __: Any, outputs: Any) -> Any:
        if weights is not None:
            outputs.log_probs = outputs.log_probs * weights[:, 1:].to(outputs.log_probs)
        return outputs

    handle = model.register_forward_hook(weigh)
    try:
        yield
    finally:
        handle.remove()


class _Pad:
    """Samples as TRL has tokenised them, in padded batches, for the pass that looks at them."""

    def __init__(self, pad_id: int) -> None:
        self.pad_id = pad_id

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        kept = [{name: sample[name] for name in ("input_ids", "labels")} for sample in samples]
        return pad_collate(kept, self.pad_id)


def _to_tokens(sample: dict[str, Any], column: str) -> dict[str, Any]:
    """A sample's value as one for each of its tokens: packing knows nothing of samples."""
    value = sample[column]
    return {column: value if isinstance(value, list) else [value] * len(sample["input_ids"])}


def _only_weighs(criterion: Criterion) -> bool:
    """Whether an objective is the task's loss with weights."""
    return type(criterion).loss is Criterion.loss
