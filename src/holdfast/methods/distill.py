r"""Distillation from the pretrained model: learning without forgetting (LwF).

Li and Hoiem, *Learning without Forgetting*, ECCV 2016, https://arxiv.org/abs/1606.09282.

With z the model's outputs, z* those of the pretrained model on the same inputs, N targets:

    Loss_T + strength · T² · Σ KL(softmax(z*/T) ‖ softmax(z/T)) / N

The paper has separate outputs for the old and the new task, and compares those of the old one
(``head="old"``). By default they are the same outputs: those of a language model, or of a new head
that was fitted to the pretrained features. The paper's
cross-entropy equals the KL divergence up to a constant. T² makes the size of the gradient
independent of T (Hinton et al., https://arxiv.org/abs/1503.02531). Multiple labels are Bernoulli
variables, and their divergences are averaged. Regression outputs are means of Gaussians with
variance 1, and T cancels: T²·KL = ½·(z − z*)².
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._torch.adapters import base_name, without_peft
from holdfast._torch.batch import evaluating, inputs_and_labels, logits_of, pad_id_of, to_device
from holdfast._torch.checks import above_zero, at_least_zero, one_of, whole_number
from holdfast._torch.layers import submodule
from holdfast._torch.layout import gathered, rank_and_world
from holdfast._torch.progress import progress_bar
from holdfast.columns import with_column
from holdfast.data import IndexedSource, as_source
from holdfast.losses import TOKEN_TASKS, LossFunction, Task, target_outputs
from holdfast.methods._base_model import (
    BaseModel,
    Outputs,
    adapters_off_base,
    base_model_cost,
    base_model_of,
)
from holdfast.methods._base_predictions import Comparison, divergence_cost, divergence_term
from holdfast.methods._kept_outputs import KeptOutputs, kept_outputs_cost
from holdfast.methods._varied import Inputs
from holdfast.stages import (
    Checks,
    Cost,
    MedianLoss,
    Planned,
    Recall,
    RecallTerm,
    Run,
    SearchRange,
    SearchSpace,
)

Head = Literal["tuned", "old"]

_COLUMN = "base_logits"
_MOST_KEPT = 1 << 30  # bytes of cached outputs


@dataclass(frozen=True)
class Distill(Recall):
    """The task's loss plus the divergence from the pretrained model's predictions on the same data.

    The source and the cost of z*:

    - One pass over the data before training, which keeps up to 1 GiB in total: z* of every sample,
      or some tokens of every target of a language model.
    - Without a cache, with :class:`~holdfast.LoRA` or new PEFT adapters: the same model with its
      adapters off, one forward pass per batch.
    - Otherwise: a frozen copy of the model, and one forward pass per batch.

    Args:
        strength: the weight of the divergence; 0 turns it off. The paper uses 1.
        temperature: T > 0. A value above 1 gives more weight to unlikely outputs; the paper uses 2.
        cache: compute z* once, before training. Turn it off if inputs are augmented at random,
            because z* must belong to the augmented input, or to compare the whole vocabulary of a
            language model. Only for the outputs and inputs that are the defaults.
        top: the number of tokens that the cache keeps per target of a language model, as in
            :class:`~holdfast.SelfReplay`: they give an unbiased estimate of the divergence.
        head: ``"tuned"`` compares the outputs that are trained. ``"old"`` compares those of the
            pretrained head on the features of the model, as the paper does; the run gets this head
            as ``old_head=``. Its task is not known: several outputs are compared by their softmax,
            also those of a multi-label head, and one output as a regression.
        inputs: ``"target"`` compares on the new data; if the new task uses the old outputs, this
            opposes learning. ``"varied"`` compares on inputs that are derived from it, as in
            :class:`~holdfast.Features`.

    Example:
        >>> from holdfast import Distill, Recipe
        >>> Recipe(recall=Distill(strength=0.5)).name
        'distill'
    """

    neutral: ClassVar[dict[str, Any] | None] = {"strength": 0.0}
    checks: ClassVar[Checks] = {
        "strength": at_least_zero,
        "temperature": above_zero,
        "top": partial(whole_number, least=2),
        "head": partial(one_of, allowed=get_args(Head)),
        "inputs": partial(one_of, allowed=get_args(Inputs)),
    }
    uses_base: ClassVar[bool] = True

    strength: float = 1.0
    temperature: float = 2.0
    cache: bool = True
    top: int = 64
    head: Head = "tuned"
    inputs: Inputs = "target"

    @property
    def needs_fitted_head(self) -> bool:
        return self.strength != 0 and self.head == "tuned"

    @property
    def changes_loss(self) -> bool:
        return self.strength != 0

    def search_space(self, lr: float, median_loss: MedianLoss) -> SearchSpace:
        return {"strength": SearchRange(0.03, 30.0, 1.0)}

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        if self.strength == 0:
            return None
        if not isinstance(task, str):
            return (
                "Distill compares the model's outputs per target, which a loss function does not "
                "return: pass the name of a task as task=, or use another recall"
            )
        if task in TOKEN_TASKS and (self.head == "old" or self.inputs == "varied"):
            return (
                "Distill with head='old' or inputs='varied' compares one row of outputs per "
                f"sample, but {task} has one per token: use head='tuned' with inputs='target', or "
                "another recall"
            )
        return None

    def cost(self, planned: Planned) -> Cost:
        if self.strength == 0:
            return Cost()
        if self.head == "old" or self.inputs == "varied":
            return kept_outputs_cost(planned)
        if planned.targets > 1:  # a language model
            return divergence_cost(planned, self.top if self.cache else None)
        size = 4 * planned.data * planned.outputs
        if self.cache and size <= _MOST_KEPT:
            return Cost(on_cpu=size, before_predicted=planned.data * planned.length)
        return base_model_cost(planned)

    def prepare(self, run: Run) -> RecallTerm:
        """Compute z* for all samples, or prepare a base model that computes it per batch."""
        if self.strength == 0:
            return RecallTerm()
        if reason := self.unfit_task(run.task):
            raise ValueError(reason)
        task = cast(Task, run.task)
        if self.head == "old" or self.inputs == "varied":
            if self.head == "old":
                return self._kept(run, OldOutputs(run), None)
            return self._kept(run, logits_of, task)
        if task in TOKEN_TASKS:
            factor, top = self.strength * self.temperature**2, self.top if self.cache else None
            return divergence_term(run, Softened(self.temperature), factor, top)
        if self.cache:
            source = as_source(run.data, run.collate, 32, pad_id_of(run.model))
            outputs = outputs_of_base(run, source) if isinstance(source, IndexedSource) else None
            if outputs is not None:
                # The objective may have added a column to the samples.
                weighed = run.criterion.data is not run.data
                data = run.criterion.data if weighed else source.data
                run.criterion.data = with_column(data, outputs, _COLUMN)
                return DistillTerm(self, task)
        return DistillTerm(self, task, base_model_of(run))

    def _kept(self, run: Run, outputs: Outputs, task: Task | None) -> RecallTerm:
        """The divergence in a pass of its own. Old outputs have no task: one is a regression."""

        def distance(base: Tensor, z: Tensor) -> Tensor:
            kind: Task = task or ("classification" if z.shape[1] > 1 else "regression")
            return divergence(base, z, kind, self.temperature)

        return KeptOutputs(run, outputs, distance, self.strength, self.inputs)


def divergence(base: Tensor, outputs: Tensor, task: Task, temperature: float) -> Tensor:
    """T²·KL(base ‖ model) per target, given one row of outputs per target.

    Example:
        >>> import torch
        >>> z = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> divergence(z, z + 3, "classification", temperature=2.0)
        tensor([0., 0.])
    """
    if task == "regression":
        return 0.5 * (outputs - base).square().mean(1)
    z_base, z = base / temperature, outputs / temperature
    if task == "multi_label":
        on, off = F.logsigmoid(z_base), F.logsigmoid(-z_base)
        bernoulli = on.exp() * (on - F.logsigmoid(z)) + off.exp() * (off - F.logsigmoid(-z))
        return temperature**2 * bernoulli.mean(1)
    log_p, log_q = F.log_softmax(z_base, -1), F.log_softmax(z, -1)
    return temperature**2 * F.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)


class Softened(Comparison):
    """The outputs divided by the temperature."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature

    def part(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs if self.temperature == 1 else outputs / self.temperature


class DistillTerm(RecallTerm):
    """The divergence on batches of samples that carry z*, or for which a base model computes it."""

    uses_outputs = True

    def __init__(self, settings: Distill, task: Task, base: BaseModel | None = None) -> None:
        self.settings, self.task, self.base = settings, task, base
        self.columns = (_COLUMN,) if base is None else ()

    def before(
        self, model: nn.Module, inputs: Any, labels: Tensor, values: Mapping[str, Tensor],
        update: int,
    ) -> Tensor:  # fmt: skip
        """Before the model, so that the memory of the base model is free again."""
        if self.base is None:
            return target_outputs(values[_COLUMN], labels, self.task)
        with torch.no_grad():
            return target_outputs(self.base(model, inputs), labels, self.task)

    def on_targets(self, before: Tensor, part: slice, outputs: Tensor, targets: Tensor) -> Tensor:
        base = before[part].to(outputs)
        apart = divergence(base, outputs, self.task, self.settings.temperature)
        return self.settings.strength * apart.sum()


class OldOutputs:
    """The outputs of the pretrained head on the features of a model."""

    def __init__(self, run: Run) -> None:
        if run.old_head is None:
            raise ValueError(
                "Distill(head='old') needs the pretrained head: keep it with "
                "PretrainedHead.of(model, name) before you replace it, and pass it as old_head= to "
                "the Run or the trainer. Without it, keep the features (the recall Features); if "
                "the model still has its pretrained head, use head='tuned' with inputs='varied'"
            )
        self.name = base_name(run.old_head.name)
        submodule(without_peft(run.model), self.name)
        self.head = copy.deepcopy(run.old_head.head).eval().requires_grad_(False)

    def __call__(self, model: nn.Module, inputs: Any) -> Tensor:
        inner = without_peft(model)
        now = inner.get_submodule(self.name)
        like = next(model.parameters())
        try:
            inner.set_submodule(self.name, self.head.to(like.device, like.dtype))
            return logits_of(model, inputs)
        finally:
            inner.set_submodule(self.name, now)


@torch.no_grad()
def outputs_of_base(run: Run, source: IndexedSource) -> list[Tensor] | None:
    """z* of every sample, in the order of the data, on the CPU; None if it needs too much memory.

    On several ranks, each rank computes its share and all ranks get all outputs.
    """
    rank, world = rank_and_world()
    found: dict[int, Tensor] = {}
    model, device = run.model, next(run.model.parameters()).device
    bar = progress_bar(source.total, "base model", shown=run.progress and rank == 0)
    with bar, evaluating(model):
        for number, (indices, read) in enumerate(source):
            if number == 0 or number % world == rank:  # all ranks need the size of the first
                inputs, labels = inputs_and_labels(model, to_device(read(), device))
                predict = adapters_off_base if run.recipe.trainable.keeps_base else logits_of
                z = predict(model, inputs).reshape(len(labels), -1)
                z = (z if z.dtype == torch.float64 else z.float()).cpu()
                if number == 0 and len(source.data) * z[0].nbytes > _MOST_KEPT:
                    return None
                # Copies: pickling a view would pickle the whole tensor.
                found.update(zip(indices, (row.clone() for row in z), strict=True))
            bar.update(len(indices))
    found = {i: row for theirs in gathered(found) for i, row in theirs.items()}
    return [found[i] for i in range(len(source.data))]
