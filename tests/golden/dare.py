"""DARE, literally: drop changes by a mask, divide the others by 1 − p, average the models."""


def dare(before, models, kept, drop, lam):
    """One tensor, as lists of numbers; ``kept`` has a mask of each model."""
    merged = []
    for p, b in enumerate(before):
        changes = [
            (tuned[p] - b) / (1 - drop) if mask[p] else 0.0
            for tuned, mask in zip(models, kept, strict=True)
        ]
        merged.append(b + lam * sum(changes) / len(changes))
    return merged
