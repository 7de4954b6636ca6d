"""OSFT, literally: one singular direction after the other, and θ* as a whole, in float64."""

import torch


def directions(weight, kept):
    """The pairs (u, v) of the largest singular values, from the eigenvectors of WᵀW."""
    weight = weight.double()
    values, vectors = torch.linalg.eigh(weight.T @ weight)
    n = min(weight.shape)
    order = values.argsort(descending=True)[: min(round(kept * n), n - 1)]
    return [(weight @ vectors[:, i] / values[i].sqrt(), vectors[:, i]) for i in order]


def orthogonal(change, pairs):
    """The part of a change that is orthogonal to every u (left) and every v (right)."""
    change = change.double().clone()
    for u, v in pairs:
        change -= torch.outer(u, u @ change)
        change -= torch.outer(change @ v, v)
    return change


def adam(weight, pretrained, gradient, state, kept, lr, betas=(0.9, 0.999), eps=1e-8):
    """One step of Adam with the projected gradient, and the projected change since θ*."""
    pairs = directions(pretrained, kept)
    g = orthogonal(gradient, pairs)
    state["t"] = t = state.get("t", 0) + 1
    state["m"] = betas[0] * state.get("m", torch.zeros_like(g)) + (1 - betas[0]) * g
    state["v"] = betas[1] * state.get("v", torch.zeros_like(g)) + (1 - betas[1]) * g * g
    m, v = state["m"] / (1 - betas[0] ** t), state["v"] / (1 - betas[1] ** t)
    moved = weight.double() - lr * m / (v.sqrt() + eps)
    return pretrained + orthogonal(moved - pretrained, pairs)
