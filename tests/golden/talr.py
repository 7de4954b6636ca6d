"""TALR, literally: max(p^(1/τ), w_min), with τ the median of the samples' mean losses."""

import math
import statistics

from golden.dft import number, targets, weighted


def tau_of(rows):
    means = [
        statistics.mean(-math.log(number(p[wanted])) for p, wanted in sample)
        for sample in rows
        if sample
    ]
    return statistics.median(means)


def loss(task, outputs, labels, tau=None, w_min=0.01):
    rows = targets(task, outputs, labels)
    tau = tau_of(rows) if tau is None else tau
    return weighted(rows, lambda p, wanted: max(p[wanted] ** (1 / tau), w_min))
