"""LP-FT: fit the head on frozen features first, then train everything.

Kumar et al., *Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution*,
ICLR 2022, https://arxiv.org/abs/2202.10054. The gradients of a random head distort the body while
the head is being learned. The gradients of a fitted head are small and do not.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast._torch.checks import at_least_zero
from holdfast._torch.layers import head_parts, output_layer
from holdfast.losses import LossFunction, Task
from holdfast.methods._batch_norm import HoldsStatistics
from holdfast.methods.linear_probe import heads_of, linear_probe
from holdfast.stages import Checks, Run


@dataclass(frozen=True)
class LPFT(HoldsStatistics):
    """Fit the head with :func:`holdfast.linear_probe`, then train everything.

    Of a head with several layers, the last linear layer is fitted, on what the others make of the
    features. The problem stays convex.

    Args:
        head: the name of the part to fit. If None, it is the last linear layer of the model's new
            parts (``new=`` of the run) and of the head found by its structure.
        l2: the strength of the ridge penalty.
        hold_statistics: as in :class:`~holdfast.Full`.

    Example:
        >>> from holdfast import LPFT, Recipe
        >>> Recipe(trainable=LPFT(l2=1e-3)).name
        'lp-ft'
    """

    checks: ClassVar[Checks] = {"l2": at_least_zero}
    neutral: ClassVar[dict[str, Any] | None] = None
    needs_pretrained_start: ClassVar[str] = "fits the head to the pretrained features"
    fits_head: ClassVar[bool] = True

    head: str | None = None
    l2: float = 1e-4

    def unfit_task(self, task: Task | LossFunction) -> str | None:
        if task in ("classification", "regression", "multi_label"):
            return None
        what = f"the task is {task}" if isinstance(task, str) else "the task is a function"
        return (
            "LPFT fits a head to one row of features per sample, for classification, regression "
            f"or multi_label, but {what}. Leave it out, or if another method needs a fitted head, "
            "train the head alone first"
        )

    def fit(self, run: Run) -> None:
        task: Any = run.task
        if reason := self.unfit_task(task):
            raise ValueError(reason)
        heads = heads_of(run, self.head)
        layer = self.head or output_layer(run.model, (*heads, *head_parts(run.model))) or heads[-1]
        linear_probe(
            run.model,
            layer,
            run.data,
            task=task,
            collate=run.collate,
            l2=self.l2,
            progress=run.progress,
        )
        if run.reference is not None:  # the fitted layer is a part of θ*
            run.reference = run.reference.with_part(run.model, layer)
