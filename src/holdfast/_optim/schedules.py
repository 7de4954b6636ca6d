"""Learning rate schedules that come with a method."""

from __future__ import annotations

from holdfast._torch.checks import above_zero

__all__ = ["slanted_triangular"]


def slanted_triangular(
    update: int, total_updates: int, *, cut: float = 0.1, ratio: float = 32
) -> float:
    """The slanted triangular schedule of ULMFiT, as a factor of the peak learning rate.

    Howard and Ruder, *Universal Language Model Fine-tuning for Text Classification*, ACL 2018,
    https://arxiv.org/abs/1801.06146, equation 3. The rate rises linearly from 1/ratio to 1 over
    the first ``cut`` of the run, and falls linearly back to 1/ratio over the rest:

        cut = ⌊T·cut_frac⌋
        p = t/cut  if t < cut,  else 1 − (t − cut)/(cut·(1/cut_frac − 1))
        η_t = η_max · (1 + p·(ratio − 1))/ratio

    Args:
        update: t, counted from 0 as in torch's ``LambdaLR``. After the end the rate stays low.
        total_updates: T.
        cut: cut_frac, the fraction of the run in which the rate rises.
        ratio: how many times smaller than the peak the lowest rate is.

    Example:
        >>> import torch
        >>> from holdfast.optim import slanted_triangular
        >>> optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.01)
        >>> scheduler = torch.optim.lr_scheduler.LambdaLR(
        ...     optimizer, lambda update: slanted_triangular(update, total_updates=100)
        ... )
        >>> scheduler.get_last_lr()
        [0.0003125]
        >>> slanted_triangular(10, 100)
        1.0
    """
    total = above_zero("total_updates", total_updates)
    if not 0 < above_zero("cut", cut) < 1:
        raise ValueError(f"cut must be a fraction of the run, in (0, 1), got {cut!r}")
    if above_zero("ratio", ratio) < 1:
        raise ValueError(f"ratio must be at least 1, got {ratio!r}")
    if update < 0:
        raise ValueError(f"update is counted from 0, got {update!r}")
    peak = int(total * cut)  # 0 in a very short run: it begins at the peak
    if update < peak:
        p = update / peak
    else:
        p = max(0.0, 1 - (update - peak) / (peak * (1 / cut - 1) or total))
    return (1 + p * (ratio - 1)) / ratio
