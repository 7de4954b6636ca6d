"""Stage 3, update: how the weights move. Each optimizer is useful alone."""

from holdfast.optim.adamw import AdamWUpdate
from holdfast.optim.ewc import EWC, fisher_importance
from holdfast.optim.l1sp import L1SP
from holdfast.optim.l2sp import L2SP
from holdfast.optim.mas import MAS, mas_importance
from holdfast.optim.mofo import MoFO, MoFOUpdate
from holdfast.optim.penalty import Penalty, attach_penalties
from holdfast.optim.recadam import RecAdam
from holdfast.optim.recadam_update import RecAdamUpdate
from holdfast.optim.schedules import slanted_triangular
from holdfast.optim.sfa import PeriodicAverage
from holdfast.optim.sgd import SGDUpdate

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
