"""Self-replay, literally: one text, one position, one token at a time."""

import math


def log_softmax(z):
    top = max(z)
    total = math.log(sum(math.exp(x - top) for x in z)) + top
    return [x - total for x in z]


def kl(base, z, top=None):
    """KL of two rows of logits over the vocabulary, or over the base's top tokens and the rest."""
    p, q = ([math.exp(x) for x in log_softmax(row)] for row in (base, z))
    if top is not None and top < len(p):
        best = sorted(range(len(p)), key=lambda i: -p[i])[:top]
        p, q = ([row[i] for i in best] + [1 - sum(row[i] for i in best)] for row in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True) if a > 0)


def divergence(base, tuned, texts, starts, top=None):
    """The mean over drawn tokens: the logits at position t predict the token at t + 1."""
    total, count = 0.0, 0
    for text, start in zip(texts, starts, strict=True):
        z_base, z = base(text), tuned(text)
        for t in range(start - 1, len(text) - 1):
            total, count = total + kl(z_base[t], z[t], top), count + 1
    return total / count
