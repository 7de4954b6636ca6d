"""SPD, literally: an AdamW step, then the projection if the condition holds."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Twin:
    theta: Tensor
    star: Tensor | None = None
    step: int = 0
    m: Tensor | float = 0.0
    v: Tensor | float = 0.0

    def update(self, g, *, lr, lam, beta1=0.9, beta2=0.999, eps=1e-8, wd=0.0):
        """Returns min(1, λ·r), or 0 if the condition does not hold."""
        self.step += 1
        self.m = beta1 * self.m + (1 - beta1) * g
        self.v = beta2 * self.v + (1 - beta2) * g * g
        m_hat = self.m / (1 - beta1**self.step)
        v_hat = self.v / (1 - beta2**self.step)
        old = self.theta
        self.theta = old - lr * wd * old - lr * m_hat / (v_hat.sqrt() + eps)
        if self.star is None:
            return 0.0
        c = -float((g * (old - self.star)).sum())
        if c >= 0:
            return 0.0
        before = float((old - self.star).square().sum()) ** 0.5
        after = float((self.theta - self.star).square().sum()) ** 0.5
        share = min(1.0, lam * max(0.0, after - before) / after) if after else 0.0
        self.theta = self.star + (1 - share) * (self.theta - self.star)  # θ* itself if 1
        return share
