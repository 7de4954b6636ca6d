"""Fine-tune a pretrained model without making it forget, when all you have is its weights."""

from holdfast import anneal, optim
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from holdfast.merging import WiseFT
from holdfast.objective import (
    Flow,
    Scores,
    count_targets,
    global_targets,
    pad_collate,
    per_sample_loss,
    score,
    weighted_loss,
    with_weights,
)
from holdfast.optim import RecAdam
from holdfast.reference import Distance, Reference
from holdfast.trainable import PretrainedHead, linear_probe, random_init

__version__ = "0.1.0"

__all__ = [
    "Anneal",
    "Constant",
    "Distance",
    "Flow",
    "Linear",
    "PretrainedHead",
    "RecAdam",
    "Reference",
    "Scores",
    "Sigmoid",
    "WiseFT",
    "anneal",
    "count_targets",
    "global_targets",
    "linear_probe",
    "optim",
    "pad_collate",
    "per_sample_loss",
    "random_init",
    "score",
    "weighted_loss",
    "with_weights",
]
