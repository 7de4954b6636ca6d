"""EAFT, literally: the entropy of the K most likely classes, divided by ln K."""

import math

from golden.dft import targets, weighted


def gate(p, k, alpha):
    top = sorted(p, reverse=True)[:k]
    q = [x / sum(top) for x in top]
    return (-sum(x * math.log(x) for x in q) / math.log(len(q))) ** alpha


def loss(task, outputs, labels, alpha=1.0, k=20):
    return weighted(targets(task, outputs, labels), lambda p, wanted: gate(p, k, alpha))
