"""FINCH, literally: the learning rate over the root of the average loss, then AdamW."""

import math
from dataclasses import dataclass

from torch import Tensor


@dataclass
class Twin:
    theta: Tensor
    step: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0
    mean_loss: float | None = None

    def update(self, g, loss, *, lr, most, alpha=0.9, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0):
        """``most`` is the largest learning rate. Returns the learning rate."""
        self.mean_loss = loss if self.step == 0 else alpha * self.mean_loss + (1 - alpha) * loss
        eta = min(lr / math.sqrt(self.mean_loss), most)
        self.step += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.step)
        v_hat = self.v / (1 - beta2**self.step)
        self.theta = self.theta - eta * wd * self.theta - eta * m_hat / (v_hat.sqrt() + eps)
        return eta
