"""Stage 1, trainable: what may change, and from where it starts."""

from holdfast.trainable.linear_probe import PretrainedHead, linear_probe
from holdfast.trainable.random_init import random_init

__all__ = ["PretrainedHead", "linear_probe", "random_init"]
