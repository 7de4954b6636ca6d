"""FLOW's linear theorem, on a million simulated samples.

x ~ N(0, Σ̃), Σ̃ = I + ρ(ē ē⊥ᵀ + ē⊥ ēᵀ), y = ⟨θ̃*, x⟩, e = θ* − θ̃*, so that the loss of a sample at θ*
is f = ⟨e, x⟩². Then w = exp(−f/τ) tilts the Gaussian into another one,

    w(x)·exp(−½ xᵀΣ̃⁻¹x) = exp(−½ xᵀ(Σ̃⁻¹ + 2 e eᵀ/τ)x)

and since eᵀΣ̃e = ‖e‖², with μ² = τ/(τ + 2‖e‖²):

    E[w]      = det(I + 2 Σ̃ e eᵀ/τ)^−½  = (1 + 2‖e‖²/τ)^−½ = μ
    E[w xxᵀ]  = μ·(Σ̃⁻¹ + 2 e eᵀ/τ)⁻¹    = μ·(Σ̃ − (1−μ²)·Σ̃ē (Σ̃ē)ᵀ)          (Sherman–Morrison)
              = μ·(I − Q)               = Σ'                                 (Σ̃ē = ē + ρē⊥)
    Q         = (1−μ²)ēēᵀ + ρ²(1−μ²)ē⊥ē⊥ᵀ − ρμ²(ēē⊥ᵀ + ē⊥ēᵀ)

The gradient of the weighted loss at θ is 2Σ'(θ − θ̃*): K steps of η lead from θ* to
θ_K = θ̃* + (I − 2ηΣ')^K e.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from holdfast import Flow

SAMPLES, DIM, ETA = 1_000_000, 6, 0.1
TAUS = [0.3, 1.0, 10.0]  # ‖e‖ = 1, and the median loss is 0.45


@dataclass
class Problem:
    """A linear task that was pretrained to θ* and is fine-tuned towards θ̃*."""

    rho: float
    x: Tensor
    pretrained: Tensor
    target: Tensor
    e_bar: Tensor
    e_perp: Tensor

    @property
    def e(self):
        return self.pretrained - self.target

    @property
    def losses(self):
        """Those of the samples at θ*."""
        return (self.x @ self.e) ** 2

    @property
    def cross(self):
        """ē ē⊥ᵀ + ē⊥ ēᵀ."""
        return torch.outer(self.e_bar, self.e_perp) + torch.outer(self.e_perp, self.e_bar)

    @property
    def sigma(self):
        """Σ̃."""
        return torch.eye(DIM, dtype=torch.float64) + self.rho * self.cross

    def sigma_prime(self, tau):
        """Σ' as the theorem writes it."""
        mu2 = 1 / (1 + 2 * float(self.e @ self.e) / tau)
        q = (
            (1 - mu2) * torch.outer(self.e_bar, self.e_bar)
            + self.rho**2 * (1 - mu2) * torch.outer(self.e_perp, self.e_perp)
            - self.rho * mu2 * self.cross
        )
        return mu2**0.5 * (torch.eye(DIM, dtype=torch.float64) - q)

    def fine_tune(self, tau, steps):
        """θ₀ … θ_K of full-batch gradient descent from θ* on the weighted loss of all samples."""
        weights, y = Flow(tau=tau).weigh(self.losses), self.x @ self.target
        theta = self.pretrained.clone().requires_grad_()
        optimizer = torch.optim.SGD([theta], lr=ETA)
        path = [self.pretrained]
        for _ in range(steps):
            optimizer.zero_grad()
            (weights * (self.x @ theta - y) ** 2).mean().backward()
            optimizer.step()
            path.append(theta.detach().clone())
        return path

    def l2(self, penalty):
        """The minimum of the mean loss + penalty·‖θ − θ*‖²."""
        covariance = self.x.T @ self.x / SAMPLES
        pulled = covariance + penalty * torch.eye(DIM, dtype=torch.float64)
        return self.target + penalty * torch.linalg.solve(pulled, self.e)

    def average(self, alpha):
        """αθ₁ + (1−α)θ*: the noise-free task is learned to the end, θ₁ = θ̃*."""
        return alpha * self.target + (1 - alpha) * self.pretrained

    def off_segment(self, theta):
        """How far θ is from the line through θ̃* and θ*, in units of ‖e‖."""
        step = theta - self.target
        return float((step - (step @ self.e_bar) * self.e_bar).norm() / self.e.norm())

    def along_segment(self, theta):
        """Where θ is on the line: 0 at θ̃*, 1 at θ*."""
        return float((theta - self.target) @ self.e_bar / self.e.norm())


@pytest.fixture(scope="module", params=[0.0, 0.6], ids=["rho=0", "rho=0.6"])
def problem(request):
    rng = torch.Generator().manual_seed(0)
    target, *directions = torch.randn(3, DIM, generator=rng, dtype=torch.float64)
    e_bar, e_perp = torch.linalg.qr(torch.stack(directions, dim=1)).Q.T
    problem = Problem(request.param, torch.empty(0), target + e_bar, target, e_bar, e_perp)
    white = torch.randn(SAMPLES, DIM, generator=rng, dtype=torch.float64)
    problem.x = white @ torch.linalg.cholesky(problem.sigma).T
    return problem


@pytest.mark.parametrize("tau", TAUS)
def test_sigma_prime_is_the_covariance_of_the_tilted_gaussian(problem, tau):
    precision = torch.linalg.inv(problem.sigma) + 2 * torch.outer(problem.e, problem.e) / tau
    covariance = torch.linalg.inv(precision)
    mean_weight = (torch.linalg.det(covariance) / torch.linalg.det(problem.sigma)).sqrt()
    torch.testing.assert_close(
        mean_weight * covariance, problem.sigma_prime(tau), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("tau", [*TAUS, float("inf"), "median"])
def test_weighted_covariance(problem, tau):
    weights = Flow(tau=tau).weigh(problem.losses)
    sampled = (problem.x * weights[:, None]).T @ problem.x / SAMPLES
    if tau == "median":  # f/‖e‖² is χ² with one degree of freedom, whatever ρ is
        tau = 0.454936 * float(problem.e @ problem.e)
    expected = problem.sigma_prime(tau)
    assert (sampled - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("tau", TAUS)
def test_gradient_descent_follows_the_closed_form(problem, tau):
    path = problem.fine_tune(tau, steps=50)
    step = torch.eye(DIM, dtype=torch.float64) - 2 * ETA * problem.sigma_prime(tau)
    for k in (1, 10, 50):
        expected = problem.target + torch.linalg.matrix_power(step, k) @ problem.e
        assert (path[k] - expected).norm() < 0.01 * problem.e.norm()
    assert (path[50] - problem.pretrained).norm() > 0.2 * problem.e.norm()


def test_only_without_correlation_all_methods_walk_one_segment(problem):
    """Averaging with the fully fine-tuned model never leaves the segment; the others do."""
    flow, l2, average = problem.fine_tune(1.0, 15)[-1], problem.l2(1.0), problem.average(0.5)
    for theta in (flow, l2, average):
        assert 0.3 < problem.along_segment(theta) < 0.7
    assert problem.off_segment(average) < 1e-12
    for theta in (flow, l2):
        if problem.rho == 0:
            assert problem.off_segment(theta) < 0.01
        else:
            assert problem.off_segment(theta) > 0.05
