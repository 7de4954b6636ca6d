"""FAPM, literally: S = |ΔW| − Avg(|W|)·|ΔW|/|W|; the largest keep their change."""


def fapm(before, tuned, keep):
    """One tensor, as lists of numbers other than 0."""
    n = len(before)
    average = sum(abs(w) for w in before) / n
    scores = []
    for w, t in zip(before, tuned, strict=True):
        delta = abs(t - w)
        scores.append(delta - average * (delta / abs(w)))
    best = sorted(range(n), key=lambda p: (-scores[p], p))[: max(1, int(keep * n))]
    return [tuned[p] if p in best else before[p] for p in range(n)]
