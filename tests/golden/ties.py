"""TIES, literally: trim each model's changes, elect a sign for each weight, average those."""


def sign(x):
    return (x > 0) - (x < 0)


def ties(before, models, density, lam):
    """One tensor, as lists of numbers."""
    n = len(before)
    count = max(1, int(density * n))
    trimmed = []
    for tuned in models:
        tau = [t - b for t, b in zip(tuned, before, strict=True)]
        order = sorted(range(n), key=lambda p: (-abs(tau[p]), p))
        trimmed.append([tau[p] if p in order[:count] else 0.0 for p in range(n)])
    merged = []
    for p in range(n):
        elected = sign(sum(tau[p] for tau in trimmed))
        agree = [tau[p] for tau in trimmed if sign(tau[p]) == elected != 0]
        merged.append(before[p] + lam * (sum(agree) / len(agree) if agree else 0.0))
    return merged
