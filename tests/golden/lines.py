"""LiNeS, literally: the update of block ℓ of L is scaled by α + β·(ℓ−1)/(L−1)."""


def lines(before, tuned, block, blocks, alpha, beta):
    """One tensor; ``block`` is ℓ = 1 … L, or None outside of the blocks."""
    factor = alpha if block is None else alpha + beta * (block - 1) / (blocks - 1)
    return [b + factor * (t - b) for b, t in zip(before, tuned, strict=True)]
