"""Target-masked KL, literally: one target, one token at a time."""

from golden.dft import log, number
from golden.dft import targets as rows_of


def masked(p, y):
    """p_\\y: the distribution of the next token, given that it is not y."""
    return [p[c] / (1 - p[y]) for c in range(len(p)) if c != y]


def divergence(base, model, y, tau=1e-4):
    """KL(base_\\y ‖ model_\\y) of two distributions; 0 where the base is certain of y."""
    if number(base[y]) > 1 - tau:
        return 0.0
    pairs = zip(masked(base, y), masked(model, y), strict=True)
    return sum(p * (log(p) - log(q)) for p, q in pairs)


def loss(task, outputs, base, labels, strength):
    """The mean over the targets of −log p(y) + strength · KL."""
    total, n = 0.0, 0
    both = zip(rows_of(task, outputs, labels), rows_of(task, base, labels), strict=True)
    for sample, of_base in both:
        for (p, y), (p_base, _) in zip(sample, of_base, strict=True):
            apart = divergence([number(x) for x in p_base], p, y)
            total, n = total - log(p[y]) + strength * apart, n + 1
    return total / n
