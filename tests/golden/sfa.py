"""SFA, literally: train; at every share of the run and at its end, average with θ*."""


def averaged_at(every, total):
    """All the updates, counted from 1, after which the weights are averaged."""
    updates, j = [], 1
    while round(every * total * j) <= total:
        updates.append(round(every * total * j))
        j += 1
    return [t for t in {*updates, total} if t >= 1]


def sfa(theta, pretrained, gradient_at, *, lr, total, every, weight):
    """Gradient descent with averaging; float64 vectors, ``gradient_at(theta, t)``."""
    for t in range(1, total + 1):
        theta = theta - lr * gradient_at(theta, t)
        if t in averaged_at(every, total):
            theta = (1 - weight) * theta + weight * pretrained
    return theta
