"""FLOW in a linear model, where the trade-off between learning and forgetting is known exactly.

A model was pretrained to θ* on x ~ N(0, I) and is fine-tuned on y = ⟨θ̃*, x⟩ with x ~ N(0, Σ̃). It
suffices to look at the plane of e = θ* − θ̃*, ‖e‖ = 1, and one direction orthogonal to it, with
correlation ρ: Σ̃ = [[1, ρ], [ρ, 1]]. FLOW's weights w = exp(−⟨e, x⟩²/τ) turn Σ̃ into
Σ' = E[w xxᵀ] = μ(Σ̃ − (1−μ²)·Σ̃e(Σ̃e)ᵀ), μ² = τ/(τ+2). With d = θ − θ̃*, d = e at the start:

    plain, K steps        d = (I − 2ηΣ̃)^K e
    FLOW, K steps         d = (I − 2ηΣ')^K e
    L2, to the minimum    d = λ(Σ̃ + λI)⁻¹ e         of loss + λ‖θ − θ*‖²
    averaging             d = e + α(d of the plain run − e)

The errors are ‖d − e‖² in pretraining and dᵀΣ̃d in fine-tuning. L2's penalty *is* the pretraining
error, so its curve is optimal here. For real models, the pretraining error is unknown.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast import Flow

Array = NDArray[np.float64]
ETA, RHO, SAMPLES = 0.02, 0.6, 500_000
SHORT, LONG = 50, 500  # K: early stopping, and a plain run that has converged
MATCHED = (0.05, 0.1, 0.2, 0.4, 0.6)  # fine-tuning errors at which to compare; θ* has 1
# Values of τ from the losses at θ*, which are χ² with one degree of freedom. The median is FLOW's
# default. With twice the mean, the slowest direction of Σ' is Σ̃⁻¹e, along which L2 reaches θ̃*.
TAUS = {"median": 0.454936, "2 × mean": 2.0}
STEPS = (50, 150, 500, 1500)  # K of the runs on samples
E = np.array([1.0, 0.0])
COLORS = ("black", "gray", "orange", "red", "hotpink", "deepskyblue", "darkred", "blue")


def sigma(rho: float) -> Array:
    return np.array([[1.0, rho], [rho, 1.0]])


def sigma_prime(rho: float, tau: float) -> Array:
    mu2, u = tau / (tau + 2), sigma(rho) @ E
    result: Array = np.sqrt(mu2) * (sigma(rho) - (1 - mu2) * np.outer(u, u))
    return result


def descend(covariance: Array, steps: float) -> Array:
    """(I − 2η·covariance)^steps e; fractional steps give smooth curves."""
    values, vectors = np.linalg.eigh(covariance)
    result: Array = vectors @ ((1 - 2 * ETA * values) ** steps * (vectors.T @ E))
    return result


def curves(rho: float) -> dict[str, Array]:
    """The d of each method over the values of its parameter, starting near θ*."""
    knob = np.geomspace(1e-4, 1e4, 1000)
    pull = [np.linalg.inv(sigma(rho) + lam * np.eye(2)) * lam for lam in knob[::-1]]
    found = {"L2, λ swept": [matrix @ E for matrix in pull]}
    found["plain, K swept"] = [descend(sigma(rho), k) for k in knob]
    for name, tau in TAUS.items():
        covariance = sigma_prime(rho, tau)
        found[f"FLOW, τ = {name}, K swept"] = [descend(covariance, k) for k in knob]
    for k in (SHORT, LONG):
        found[f"FLOW, K = {k}, τ swept"] = [descend(sigma_prime(rho, tau), k) for tau in knob]
        way = descend(sigma(rho), k) - E
        found[f"averaging, K = {k}, α swept"] = [E + a * way for a in np.linspace(0, 1, 1000)]
    return {name: np.stack(points) for name, points in found.items()}


def errors(d: Array, rho: float) -> tuple[Array, Array]:
    """The errors in fine-tuning and in pretraining, for each row of d."""
    return np.einsum("ni,ij,nj->n", d, sigma(rho), d), ((d - E) ** 2).sum(-1)


def matched(d: Array, rho: float) -> Array:
    """The pretraining errors at the fine-tuning errors of MATCHED."""
    tuning, pretraining = errors(d, rho)
    return np.interp(MATCHED, tuning[::-1], pretraining[::-1])


def simulate(rho: float) -> Array:
    """FLOW with its default τ on samples, after each number of STEPS."""
    x = torch.from_numpy(np.random.default_rng(0).multivariate_normal(0 * E, sigma(rho), SAMPLES))
    weights = Flow().weigh((x @ torch.from_numpy(E)) ** 2)  # from the losses at θ*
    covariance = ((x * weights[:, None]).T @ x / SAMPLES).numpy()
    return np.stack([descend(covariance, k) for k in STEPS])


def report() -> None:
    table = {name: matched(d, RHO) for name, d in curves(RHO).items()}
    print(f"Pretraining error at equal fine-tuning error, ρ = {RHO}\n")
    for name, row in {"fine-tuning error": np.array(MATCHED), **table}.items():
        print(f"{name:32}" + "".join(f"{error:9.4f}" for error in row))

    def gap(name: str, other: str) -> str:
        percent = 100 * (table[name] / table[other] - 1)
        return f"{percent.min():+.1f} to {percent.max():+.1f} %"

    print("\nAt equal fine-tuning error, FLOW's pretraining error differs")
    for k in (LONG, SHORT):
        versus = gap(f"FLOW, K = {k}, τ swept", f"averaging, K = {k}, α swept")
        print(f"  from averaging's by {versus} after {k} steps each;")
    for tau in TAUS:
        swept = f"FLOW, τ = {tau}, K swept"
        print(f"  from plain early stopping's by {gap(swept, 'plain, K swept')} with τ = {tau};")
        print(f"  from L2's, the optimum here, by {gap(swept, 'L2, λ swept')} with τ = {tau};")
    spread = np.ptp([matched(d, 0.0) for d in curves(0.0).values()], axis=0).max()
    print(f"With ρ = 0 all curves coincide (the largest difference is {spread:.1e}).")
    exact = np.stack([descend(sigma_prime(RHO, TAUS["median"]), k) for k in STEPS])
    off = 100 * np.linalg.norm(simulate(RHO) - exact, axis=1).max()
    print(f"On {SAMPLES:,} samples, FLOW is at most {off:.2f} % of ‖e‖ from its closed form.")


def draw(out: Path) -> None:
    try:
        subplots = importlib.import_module("plotly.subplots")
    except ImportError:
        sys.exit('--out needs plotly: pip install ".[cli]"')
    titles = [f"pretraining error, {what}" for what in ("ρ = 0", f"ρ = {RHO}", "÷ L2's")]
    figure = subplots.make_subplots(rows=2, cols=2, subplot_titles=[*titles, "path of θ − θ̃*"])
    for panel, rho in enumerate((0.0, RHO, RHO, RHO)):
        lines = {**curves(rho), "FLOW on samples, τ = median": simulate(rho)}
        best = errors(lines["L2, λ swept"], rho)
        at = {"row": panel // 2 + 1, "col": panel % 2 + 1}
        for (name, d), color in zip(lines.items(), (*COLORS, "orange"), strict=True):
            x, y = d.T if panel == 3 else errors(d, rho)
            if panel == 2:
                y = y / np.interp(x, best[0][::-1], best[1][::-1])
            mode = "markers" if "samples" in name else "lines"
            look = {"line_dash": "dot" if "averaging" in name else "solid", "marker_color": color}
            legend = {"name": name, "legendgroup": name, "showlegend": panel == 0}
            figure.add_scatter(x=x, y=y, mode=mode, line_color=color, **look, **legend, **at)
        figure.update_xaxes(title="along e" if panel == 3 else "fine-tuning error", **at)
    figure.update_xaxes(range=(0.01, 0.95), row=2, col=1)  # at θ* it is 0 ÷ 0
    figure.update_yaxes(range=(0.98, 1.4), row=2, col=1)
    figure.update_layout(template="plotly_white", height=900).write_html(out, include_plotlyjs=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="also draw the curves")
    out: Path | None = parser.parse_args().out
    report()
    if out:
        draw(out)
