"""Model Stock, literally: t = K·cos φ / (1 + (K−1)·cos φ), between the average and the base."""

import itertools
import math


def model_stock(before, models):
    """One tensor, as lists of numbers."""
    k = len(models)
    deltas = [[t - b for t, b in zip(tuned, before, strict=True)] for tuned in models]
    cosines = [
        sum(x * y for x, y in zip(a, b, strict=True)) / (math.hypot(*a) * math.hypot(*b))
        for a, b in itertools.combinations(deltas, 2)
    ]
    cos = sum(cosines) / len(cosines)
    t = k * cos / (1 + (k - 1) * cos)
    average = [sum(values) / k for values in zip(*models, strict=True)]
    return [t * a + (1 - t) * b for a, b in zip(average, before, strict=True)]
