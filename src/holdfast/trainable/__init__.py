"""Stage 1, trainable: what may change, and from where it starts."""

from holdfast.trainable.random_init import random_init

__all__ = ["random_init"]
