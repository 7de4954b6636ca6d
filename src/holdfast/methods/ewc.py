"""EWC: a quadratic penalty that weights each coordinate by its Fisher information.

Kirkpatrick et al., *Overcoming catastrophic forgetting in neural networks*, PNAS 2017,
https://arxiv.org/abs/1612.00796:  ½·β·Σ Fᵢ·(θᵢ − θ*ᵢ)².

F is the diagonal of the Fisher information at θ*, E[(∂ log p(y|x)/∂θᵢ)²]. Without pretraining data
it is measured on the training data: with labels sampled from the model (the true Fisher), or with
the data's labels (the empirical Fisher).
"""

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from holdfast._optim.importance import check_samples, mean_over_samples, measured, tokens_read
from holdfast._torch.checks import one_of
from holdfast._torch.dtypes import widen
from holdfast._torch.lm_head import Split, predict
from holdfast.data import Collate
from holdfast.losses import IGNORED, LossFunction, Task, infer_task, target_mask
from holdfast.methods.l2_sp import QuadraticPenalty
from holdfast.reference import Reference
from holdfast.stages import Checks, Cost, Planned, Run

Kind = Literal["true", "empirical"]
FISHER_TASKS = ("classification", "causal_lm", "token_classification")
_check_kind = partial(one_of, allowed=get_args(Kind))


@dataclass(frozen=True)
class EWC(QuadraticPenalty):
    """½ · strength · Σ F·(θ − θ*)²; F comes from :func:`fisher_importance`.

    Decoupled: θ ← θ − min(1, lr · strength · F) · (θ − θ*).

    Args:
        strength, coupled: as in :class:`~holdfast.L2SP`; strengths are comparable if F has mean 1.
        kind, samples: of :func:`fisher_importance`, which a recipe calls on the training data.
        normalize: in a recipe, scale F to a mean of 1 over the penalized parameters.

    Example:
        >>> from holdfast import EWC
        >>> EWC(strength=50.0, kind="empirical").samples
        1000
    """

    checks: ClassVar[Checks] = {"kind": _check_kind, "samples": check_samples}
    weighted: ClassVar[bool] = True

    kind: Kind = "true"
    samples: int | None = 1000
    normalize: bool = True

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        if not self.acts or task in FISHER_TASKS:
            return None
        return f"the Fisher information needs class predictions, not {task!r}"

    def cost(self, planned: Planned) -> Cost:
        return replace(
            super().cost(planned), before_trained=tokens_read(self.samples, planned) * self.acts
        )

    def measure_importance(self, run: Run) -> Reference | None:
        if not self.acts:
            return None
        options = {"kind": self.kind, "task": run.task, "samples": self.samples}
        return measured(run, self.normalize, fisher_importance, **options)


def fisher_importance(
    model: nn.Module,
    data: Any,
    *,
    kind: Kind = "true",
    task: Task | None = None,
    collate: Collate | None = None,
    batch_size: int = 8,
    samples: int | None = None,
    seed: int = 0,
    normalize: bool = False,
    progress: bool = True,
) -> Reference:
    """The diagonal Fisher information of a model on data, by parameter name.

    The gradient of each sample is squared separately, through ``torch.func``. A sequence is one
    sample, and its loss is the sum over its targets. Frozen parameters are skipped.

    Args:
        model: holding its pretrained weights; run in eval mode.
        data, collate, batch_size, progress: as for :func:`holdfast.score`.
        kind: ``"true"`` samples labels from the model's predictions (at the positions that have
            targets); ``"empirical"`` uses the data's labels.
        task: as for :func:`holdfast.score`; classification, causal_lm or token_classification.
        samples: how many samples to draw. If None, or for an iterable of batches, all are used.
        seed: of the sampled labels and samples; labels differ between a GPU and a CPU.
        normalize: scale to a mean of 1.

    Example:
        >>> import torch
        >>> from holdfast.optim import fisher_importance
        >>> model, x, y = torch.nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 1])
        >>> fisher = fisher_importance(model, [(x, y)], task="classification", progress=False)
        >>> fisher["weight"].shape
        torch.Size([2, 3])
    """
    task = infer_task(model) if task is None else task
    if task not in FISHER_TASKS:
        raise ValueError(f"the Fisher information needs class predictions, not {task!r}")
    _check_kind("kind", kind)
    run = Split(model) if task == "causal_lm" else partial(predict, model)
    # On the device of the logits, which need not be the first of a model on several devices.
    generator_on = cache(lambda device: torch.Generator(device).manual_seed(seed))

    @torch.no_grad()
    def labels_of(inputs: Any, labels: Tensor) -> Tensor:
        if kind == "empirical":
            return labels
        where = target_mask(labels, task)
        # The logits at t of a causal model predict the label at t + 1.
        predicts = where.roll(-1, dims=1) if task == "causal_lm" else where
        drawn = [
            torch.multinomial(logits.softmax(-1), 1, generator=generator_on(logits.device))[:, 0]
            for logits, _ in run(inputs).logits(predicts, labels[where])
        ]
        labels = labels.clone()
        labels[where] = torch.cat(drawn).to(labels)
        return labels

    def negative_log_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
        if task == "causal_lm":
            logits, labels = logits[:, :-1], labels[:, 1:]
        if task != "classification":
            logits, labels = logits.flatten(0, 1), labels.flatten()
        return F.cross_entropy(widen(logits), labels, ignore_index=IGNORED, reduction="sum")

    return mean_over_samples(
        model, data, collate, batch_size, labels_of, negative_log_likelihood, torch.square,
        samples=samples, seed=seed, normalize=normalize, progress=progress,
    )  # fmt: skip
