"""Self-replay, literally: one text, one position, one token at a time."""

import math


def log_softmax(z):
    top = max(z)
    total = math.log(sum(math.exp(x - top) for x in z)) + top
    return [x - total for x in z]


def kl(base, z, likeliest=None, drawn=()):
    """KL of two rows of logits over the vocabulary, or its estimate from some of the tokens.

    The drawn tokens stand for all that are not the likeliest, each for an equal part. With r = q/p,
    the mean of r − 1 is 0: a share c of it is added, which cancels noise near the base.
    """
    log_p, log_q = log_softmax(base), log_softmax(z)
    best = sorted(range(len(log_p)), key=lambda i: -log_p[i])[:likeliest]
    log_r = [q - p for p, q in zip(log_p, log_q, strict=True)]
    r = [math.exp(x) for x in log_r]
    rest = 1 - sum(math.exp(log_p[i]) for i in best)
    weights = [(i, math.exp(log_p[i])) for i in best] + [(i, rest / len(drawn)) for i in drawn]
    c = 1 / (1 + 5 * sum(w * (r[i] - 1 - log_r[i]) for i, w in weights[: len(best)]))
    return sum(w * (c * (r[i] - 1) - log_r[i]) for i, w in weights)


def divergence(base, tuned, texts, starts, likeliest=None, drawn=None):
    """The mean over drawn tokens: the logits at position t predict the token at t + 1.

    ``drawn`` has the tokens that stand for the others, per text and predicted token.
    """
    total, count = 0.0, 0
    for i, (text, start) in enumerate(zip(texts, starts, strict=True)):
        z_base, z = base(text), tuned(text)
        for t in range(start - 1, len(text) - 1):
            some = () if drawn is None else drawn[i][t - start + 1]
            total, count = total + kl(z_base[t], z[t], likeliest, some), count + 1
    return total / count
