"""Mixout, literally: the equation of the paper for one weight after the other, in float64."""

import torch


def mixed(weight, anchor, mask, p):
    """(m·θ* + (1 − m)·θ − p·θ*) / (1 − p)."""
    result = torch.empty_like(weight, dtype=torch.float64)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            theta, star, m = float(weight[i, j]), float(anchor[i, j]), float(mask[i, j])
            result[i, j] = (m * star + (1 - m) * theta - p * star) / (1 - p)
    return result


def gradient(outer, mask, p):
    """dL/dθ of a loss whose gradient at the mixed weights is ``outer``."""
    result = torch.empty_like(outer, dtype=torch.float64)
    for i in range(outer.shape[0]):
        for j in range(outer.shape[1]):
            result[i, j] = float(outer[i, j]) * (1 - float(mask[i, j])) / (1 - p)
    return result
