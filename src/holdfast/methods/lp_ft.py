"""LP-FT: fit the head on frozen features first, then train everything.

Kumar et al., *Fine-Tuning can Distort Pretrained Features and Underperform Out-of-Distribution*,
ICLR 2022, https://arxiv.org/abs/2202.10054. The gradients of a random head distort the body while
the head is being learned. The gradients of a fitted head are small and do not.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from holdfast._torch.checks import at_least_zero
from holdfast.methods._batch_norm import HoldsStatistics
from holdfast.methods.linear_probe import heads_of, linear_probe
from holdfast.stages import Checks, Run


@dataclass(frozen=True)
class LPFT(HoldsStatistics):
    """Fit the head with :func:`holdfast.linear_probe`, then train everything.

    Args:
        head: the name of the head. If None, the head is the new part of the model (``new=`` of the
            run), or is found by the model's structure.
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

    def fit(self, run: Run) -> None:
        task: Any = run.task
        if task not in ("classification", "regression", "multi_label"):
            what = f"the task is {task}" if isinstance(task, str) else "the task is a function"
            raise ValueError(
                "LPFT fits a head to one row of features per sample, for classification, "
                f"regression or multi_label, but {what}. Use another trainable, such as the preset "
                "full or gradual-unfreezing"
            )
        heads = heads_of(run, self.head)
        if len(heads) > 1:
            raise ValueError(
                f"LPFT fits one head, but {', '.join(heads)} are new: choose one with head="
            )
        linear_probe(
            run.model,
            heads[0],
            run.data,
            task=task,
            collate=run.collate,
            l2=self.l2,
            progress=run.progress,
        )
        if run.reference is not None:  # the fitted head is a part of θ*
            run.reference = run.reference.with_part(run.model, heads[0])
