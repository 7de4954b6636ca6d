"""Recipes in TRL's trainers.

    trainer = HoldfastSFTTrainer(
        model=model, recipe=recipe, args=SFTConfig(...), train_dataset=dataset
    )

In SFTTrainer, conversations, prompts with completions, plain text, completion-only loss, packing,
padding-free batches and PEFT configurations work as in TRL. The recipe's weights reach the right
tokens. DPOTrainer and GRPOTrainer keep their own loss.
"""

import copy
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from holdfast._torch.imports import require
from holdfast.columns import keeping, take_columns
from holdfast.data import Collate, pad_collate
from holdfast.hosts._packing import per_token
from holdfast.hosts.hf import WithRecipe
from holdfast.losses import IGNORED, Predicted, target_mask
from holdfast.recipe import Recipe, as_recipe
from holdfast.stages import Criterion

require("trl", extra="trl", what="The TRL host")
from transformers import Trainer  # noqa: E402
from trl.data_utils import pack_dataset  # noqa: E402
from trl.trainer.dpo_trainer import DPOTrainer  # noqa: E402
from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402
from trl.trainer.sft_config import SFTConfig  # noqa: E402
from trl.trainer.sft_trainer import SFTTrainer  # noqa: E402

__all__ = ["HoldfastDPOTrainer", "HoldfastGRPOTrainer", "HoldfastSFTTrainer"]


class HoldfastSFTTrainer(WithRecipe, SFTTrainer):
    """TRL's SFTTrainer with a recipe.

    Args:
        recipe, new, reference, old_data: see :class:`~holdfast.hosts.hf.WithRecipe`.
        args, kwargs: the arguments of SFTTrainer.

    Samples are scored after TRL has tokenized and truncated them, and packed afterwards, so that
    each token carries the weight of its own sample.
    """

    def __init__(self, *args: Any, recipe: Recipe | str, **kwargs: Any) -> None:
        recipe = as_recipe(recipe)
        if reason := recipe.objective.packing_conflict():
            raise ValueError(reason)
        self._seen_training_data = False
        self._packs_later = False
        self._samples: int | None = None  # before packing, if this is known
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
        """Prepare a dataset as TRL does, but pack training data only after it was scored."""
        first = not hasattr(self, "train_dataset") and not self._seen_training_data
        if dataset_name == "train" and first:  # later calls may use this name for eval data
            self._seen_training_data = True
            self._samples = len(dataset) if hasattr(dataset, "__len__") else None
            if packing and self.run.recipe.reads_data:
                self._packs_later, packing = True, False
                args = copy.copy(args)
                args.truncation_mode = "keep_start"  # as packing does
                if args.packing_strategy != "bfd":  # other strategies do not truncate
                    args.max_length = None
        return super()._prepare_dataset(
            dataset, processing_class, args, packing, formatting_func, dataset_name
        )

    @property
    def _samples_per_row(self) -> float:
        """Above 1 if samples are packed."""
        rows: Any = self.train_dataset
        known = self._samples and hasattr(rows, "__len__")
        return max(1.0, cast(int, self._samples) / len(rows)) if known else 1.0

    def _samples_per_update(self) -> int:
        return round(super()._samples_per_update() * self._samples_per_row)

    def _prepare_data(self) -> None:
        collator: Any = self.data_collator
        if self.run.old_data is not None:
            prepare: Any = super()._prepare_dataset
            self.run.old_data = prepare(
                self.run.old_data, self.processing_class, self.args, False,
                getattr(self, "_formatting_func", None), "old_data",
            )  # fmt: skip
        pad = partial(_pad_tokens, pad_id=getattr(collator, "pad_token_id", 0))
        args = cast(SFTConfig, self.args)
        if self._has_own_loss and args.loss_type != "nll":
            raise ValueError(
                f"the recipe's loss and loss_type={args.loss_type!r} are two losses: set "
                'loss_type="nll"'
            )
        self._prepare_run(self.train_dataset, pad if self.run.recipe.reads_data else collator)
        criterion = self.run.criterion
        data, columns = criterion.data, criterion.columns
        for column in columns:
            data = data.map(lambda row, name=column: {name: per_token(row, name)})
        self.data_collator = keeping(collator, *columns, optional=True)
        if self._packs_later:
            data = data.select_columns(["input_ids", "labels", *columns])
            data = pack_dataset(data, cast(int, args.max_length), args.packing_strategy)
        self.train_dataset = data

    @property
    def _has_trls_loss(self) -> bool:
        """Whether the loss is TRL's own, perhaps with weights. Its fused head has no logits."""
        criterion = self.run.criterion
        uses_logits = criterion.needs_outputs or criterion.recall.uses_outputs
        return type(criterion).loss is Criterion.loss and not uses_logits

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        if self._has_trls_loss:
            return Trainer._get_num_items_in_batch(self, batch_samples, device)
        return super()._get_num_items_in_batch(batch_samples, device)

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """TRL's loss with the recipe's weights, or the recipe's loss if it uses the outputs."""
        if not (self._has_own_loss and self._has_trls_loss and model.training):
            return super().compute_loss(model, inputs, *args, **kwargs)
        criterion = self.run.criterion
        inputs, values = take_columns(inputs, criterion.columns)
        weights_of = partial(criterion.weigh, inputs, values, self.state.global_step + 1)

        def weigh(module: nn.Module, given: Any, outputs: Any) -> Any:
            if not hasattr(outputs, "log_probs"):
                raise ValueError(
                    f"a patch has replaced TRL's loss, so the recipe {self.run.recipe.name} cannot "
                    "weight its tokens: train without packing, with a class of (WithRecipe, "
                    "SFTTrainer)"
                )
            # TRL's fused head returns the log-probabilities of labels[:, 1:]. Its metrics stay.
            predicted = None
            if criterion.weighs_outputs:
                predicted = _predicted(outputs.log_probs, inputs["labels"])
            weights = weights_of(predicted)
            if weights is not None:
                outputs.log_probs = outputs.log_probs * weights[:, 1:].to(outputs.log_probs)
            return outputs

        with model.register_forward_hook(weigh):
            trl: Any = SFTTrainer.compute_loss
            return trl(self, model, inputs, *args, **kwargs)

    def _share_of_auxiliary(self) -> float:
        """Like TRL's own loss: the mean over micro-batches and ranks."""
        return 1.0 / self.current_gradient_accumulation_steps


def _predicted(log_probs: Tensor, labels: Tensor) -> Predicted:
    """The losses of all targets, given the log-probabilities of ``labels[:, 1:]``."""
    where = target_mask(labels, "causal_lm")
    losses = -log_probs.detach()[where[:, 1:]]
    return Predicted(labels, where, losses, None)


def _pad_tokens(samples: list[Any], pad_id: int) -> dict[str, Tensor]:
    """Collate samples that TRL has tokenized, for the pass that scores them."""
    kept = [{name: sample[name] for name in ("input_ids", "labels")} for sample in samples]
    return pad_collate(kept, pad_id)


class HoldfastDPOTrainer(WithRecipe, DPOTrainer):
    """TRL's DPOTrainer with a recipe.

    Args:
        recipe, new, reference: see :class:`~holdfast.hosts.hf.WithRecipe`.
        args, kwargs: the arguments of DPOTrainer.

    The loss is TRL's, and its reference model is the pretrained model, also with adapters of the
    recipe. Methods that read the data before training read the chosen completions. Methods that
    change the loss of labeled samples raise an error.

    Without ``ref_model`` and without adapters, TRL loads the reference by the model's name. If the
    weights were changed in memory, the reference lacks these changes: pass ``ref_model``.
    """

    def _samples_to_read(self) -> tuple[Any, Collate]:
        data, collate = super()._samples_to_read()
        return data, partial(_collate_chosen, collate)


class HoldfastGRPOTrainer(WithRecipe, GRPOTrainer):
    """TRL's GRPOTrainer with a recipe.

    Args:
        recipe, new, reference: see :class:`~holdfast.hosts.hf.WithRecipe`.
        args, kwargs: the arguments of GRPOTrainer.

    The loss is TRL's. Its data has prompts only, so methods that read labeled samples, or change
    their loss, raise an error. A recall counts once per update, however many updates use the same
    completions.
    """


def _collate_chosen(collate: Collate, samples: list[Any]) -> dict[str, Tensor]:
    """The chosen completions of preferences, as labeled samples."""
    batch = collate(samples)  # the chosen ones, then the rejected ones
    batch["labels"] = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
    names = ("input_ids", "attention_mask", "labels")
    return {name: batch[name][: len(samples)] for name in names}
