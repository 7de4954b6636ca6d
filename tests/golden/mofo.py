"""MoFO, literally: sort by momentum, move the first, leave the rest."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Twin:
    theta: Tensor
    step: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0

    def update(self, g, *, lr, fraction, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0):
        self.step += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.step)
        v_hat = self.v / (1 - beta2**self.step)
        moved = self.theta - lr * wd * self.theta - lr * m_hat / (v_hat.sqrt() + eps)
        n = self.theta.numel()
        chosen = list(range(n))
        if self.theta.dim() > 1:
            size = self.m.abs().flatten().nan_to_num(torch.inf, torch.inf).tolist()
            chosen = sorted(chosen, key=lambda i: (-size[i], i))[: max(1, round(fraction * n))]
        theta = self.theta.clone().flatten()
        theta[chosen] = moved.flatten()[chosen]
        self.theta = theta.view_as(self.theta)
        return torch.tensor(sorted(chosen))
