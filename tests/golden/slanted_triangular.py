"""ULMFiT's equation 3, literally."""

import math


def rate(t, T, *, cut_frac, ratio, eta_max):  # noqa: N803
    cut = math.floor(T * cut_frac)
    p = t / cut if t < cut else 1 - (t - cut) / (cut * (1 / cut_frac - 1))
    return eta_max * (1 + p * (ratio - 1)) / ratio
