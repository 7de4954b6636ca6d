"""The multi-task objective, literally: two means, and λ between them."""


def mean(losses_by_sample):
    """Over all targets: one list of target losses for each sample."""
    every = [loss for losses in losses_by_sample for loss in losses]
    return sum(every) / len(every)


def objective(new, old, lam):
    return lam * mean(new) + (1 - lam) * mean(old)
