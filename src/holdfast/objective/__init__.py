"""Stage 2, objective: what is minimised."""

from holdfast.objective.data import pad_collate
from holdfast.objective.flow import Flow
from holdfast.objective.losses import (
    count_targets,
    global_targets,
    per_sample_loss,
    weighted_loss,
)
from holdfast.objective.scores import Scores
from holdfast.objective.scoring import score
from holdfast.objective.weights import with_weights

__all__ = [
    "Flow",
    "Scores",
    "count_targets",
    "global_targets",
    "pad_collate",
    "per_sample_loss",
    "score",
    "weighted_loss",
    "with_weights",
]
