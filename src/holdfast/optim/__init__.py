"""Stage 3, update: how the weights move. Each optimizer is useful alone."""

from holdfast.optim.mofo import MoFO
from holdfast.optim.recadam import RecAdam

__all__ = ["MoFO", "RecAdam"]
