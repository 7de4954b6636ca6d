"""The loss of kept features, literally: one sample, one position, one coordinate at a time."""


def pooled(states, length):
    """The mean of the first ``length`` states of a sample."""
    return [sum(states[t][d] for t in range(length)) / length for d in range(len(states[0]))]


def relative_distance(base, features):
    difference = sum((z - b) ** 2 for z, b in zip(features, base, strict=True))
    return difference / sum(b * b for b in base)


def loss(task_losses, base, features, strength):
    """Mean task loss + strength · mean relative distance, over samples of lists of scalars."""
    apart = [relative_distance(b, z) for b, z in zip(base, features, strict=True)]
    return (sum(task_losses) + strength * sum(apart)) / len(task_losses)
