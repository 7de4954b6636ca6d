"""Learning without forgetting, literally: one target, one class at a time."""

import math


def softmax(z, temperature):
    """Lists in, lists out; also of scalar tensors, to differentiate."""
    powers = [_exp(x / temperature) for x in z]
    return [p / sum(powers) for p in powers]


def kl(base, z, temperature):
    p, q = softmax(base, temperature), softmax(z, temperature)
    return sum(p[c] * (_log(p[c]) - _log(q[c])) for c in range(len(z)))


def bernoulli_kl(base, z, temperature):
    """The mean over independent labels."""
    total = 0.0
    for b, x in zip(base, z, strict=True):
        p, q = 1 / (1 + _exp(-b / temperature)), 1 / (1 + _exp(-x / temperature))
        total = total + p * (_log(p) - _log(q)) + (1 - p) * (_log(1 - p) - _log(1 - q))
    return total / len(z)


def targets(task, z, label):
    """The rows of one sample that speak of a target, and their labels."""
    if task == "causal_lm":
        return [(t - 1, label[t]) for t in range(1, len(label)) if label[t] != -100]
    return [(t, label[t]) for t in range(len(label)) if label[t] != -100]


def loss(task, outputs, base, labels, strength, temperature):
    """Task loss + strength·T²·Σ KL / N, over samples of nested lists (or tensors)."""
    task_loss, apart, n = 0.0, 0.0, 0
    for z, b, label in zip(outputs, base, labels, strict=True):
        if task == "regression":
            task_loss = task_loss + sum((x - y) ** 2 for x, y in zip(z, label, strict=True)) / len(
                z
            )
            # of the Gaussians N(z/T, 1): ½·((z − z*)/T)²
            squares = [((x - y) / temperature) ** 2 / 2 for x, y in zip(z, b, strict=True)]
            apart, n = apart + sum(squares) / len(z), n + 1
        elif task == "multi_label":
            q = [1 / (1 + _exp(-x)) for x in z]
            entropies = [-_log(p if y else 1 - p) for p, y in zip(q, label, strict=True)]
            task_loss = task_loss + sum(entropies) / len(z)
            apart, n = apart + bernoulli_kl(b, z, temperature), n + 1
        elif task == "classification":
            task_loss = task_loss - _log(softmax(z, 1.0)[label])
            apart, n = apart + kl(b, z, temperature), n + 1
        else:
            for t, wanted in targets(task, z, label):
                task_loss = task_loss - _log(softmax(z[t], 1.0)[wanted])
                apart, n = apart + kl(b[t], z[t], temperature), n + 1
    return (task_loss + strength * temperature**2 * apart) / n


def _exp(x):
    return x.exp() if hasattr(x, "exp") else math.exp(x)


def _log(x):
    return x.log() if hasattr(x, "log") else math.log(x)
