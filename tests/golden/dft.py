"""DFT, literally: −p·log p of every target, with the first p as a number."""

import math

from golden.distill import softmax
from golden.distill import targets as token_targets


def targets(task, outputs, labels):
    """The probabilities at each target and the wanted class, sample by sample."""
    found = []
    for z, label in zip(outputs, labels, strict=True):
        if task == "classification":
            pairs = [(z, int(label))]
        else:
            pairs = [(z[t], int(wanted)) for t, wanted in token_targets(task, z, label)]
        found.append([(softmax([*row], 1.0), wanted) for row, wanted in pairs])
    return found


def weighted(rows, weight_of):
    """Σ weight·(−log p) / N over samples of targets."""
    total, n = 0.0, 0
    for sample in rows:
        for p, wanted in sample:
            weight = weight_of([number(x) for x in p], wanted)
            total, n = total - weight * log(p[wanted]), n + 1
    return total / n


def loss(task, outputs, labels, power=1.0):
    return weighted(targets(task, outputs, labels), lambda p, wanted: p[wanted] ** power)


def number(x):
    """Without its gradient."""
    return x.item() if hasattr(x, "item") else x


def log(x):
    return x.log() if hasattr(x, "log") else math.log(x)
