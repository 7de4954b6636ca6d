"""RecAdam, literally: one number formatted as the rule is written, float64, no torch.optim.

λ(t) = 1/(1+exp(−k(t−t0)))
m ← β₁m + (1−β₁)g            v ← β₂v + (1−β₂)g²
u = m̂ / (√v̂ + ε)
θ ← θ − lr·wd·θ
θ ← θ − lr·λ·u
θ ← θ − c·(θ − θ*),  c = min(1, lr·(1−λ)·γ·F), F = 1 unless importance is given
"""

import math
from dataclasses import dataclass, field

from torch import Tensor


def sigmoid_lambda(t, k, t0):
    return 1.0 / (1.0 + math.exp(-k * (t - t0)))


@dataclass
class Twin:
    """One parameter, its anchor (None: plain Adam) and its own Adam state."""

    theta: Tensor
    anchor: Tensor | None
    step: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = field(default=0.0)

    def update(self, g, *, lr, lam, gamma, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0, F=1.0):  # noqa: N803
        self.step += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.step)
        v_hat = self.v / (1 - beta2**self.step)
        u = m_hat / (v_hat.sqrt() + eps)
        if self.anchor is None:
            lam = 1.0
        theta = self.theta - lr * wd * self.theta
        theta = theta - lr * lam * u
        if self.anchor is not None:
            c = lr * (1 - lam) * gamma * F
            c = c.clamp(max=1.0) if isinstance(c, Tensor) else min(1.0, c)
            theta = theta - c * (theta - self.anchor)
        self.theta = theta
