"""Stage 3, update: how the weights move. Each optimizer is useful alone."""

from holdfast._optim.penalty import attach_penalties
from holdfast._optim.schedules import slanted_triangular
from holdfast.methods.adamw import AdamWUpdate
from holdfast.methods.ewc import EWC, fisher_importance
from holdfast.methods.l1_sp import L1SP
from holdfast.methods.l2_sp import L2SP
from holdfast.methods.mas import MAS, mas_importance
from holdfast.methods.mofo import MoFO, MoFOUpdate
from holdfast.methods.recadam import RecAdam, RecAdamUpdate
from holdfast.methods.sfa import PeriodicAverage
from holdfast.methods.sgd import SGDUpdate
from holdfast.stages import Penalty

__all__ = [
    "EWC",
    "L1SP",
    "L2SP",
    "MAS",
    "AdamWUpdate",
    "MoFO",
    "MoFOUpdate",
    "Penalty",
    "PeriodicAverage",
    "RecAdam",
    "RecAdamUpdate",
    "SGDUpdate",
    "attach_penalties",
    "fisher_importance",
    "mas_importance",
    "slanted_triangular",
]
