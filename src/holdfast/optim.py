"""The optimizers and the functions around them, each useful without a recipe."""

from holdfast._optim.penalties import attach_penalties
from holdfast.methods.ewc import fisher_importance
from holdfast.methods.finch import Finch
from holdfast.methods.gradual_unfreezing import slanted_triangular
from holdfast.methods.mas import mas_importance
from holdfast.methods.mofo import MoFO
from holdfast.methods.recadam import RecAdam
from holdfast.methods.spd import SPD
from holdfast.stages import Penalty

__all__ = [
    "SPD",
    "Finch",
    "MoFO",
    "Penalty",
    "RecAdam",
    "attach_penalties",
    "fisher_importance",
    "mas_importance",
    "slanted_triangular",
]
