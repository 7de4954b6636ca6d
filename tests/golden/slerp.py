"""SLERP, literally, between two vectors."""

import math


def slerp(before, tuned, t):
    norm = math.hypot(*before) * math.hypot(*tuned)
    omega = math.acos(sum(b * x for b, x in zip(before, tuned, strict=True)) / norm)
    mine, theirs = (math.sin(s * omega) / math.sin(omega) for s in (1 - t, t))
    return [mine * b + theirs * x for b, x in zip(before, tuned, strict=True)]
