"""Stage 2, objective: what is minimised."""

from holdfast.data import pad_collate
from holdfast.losses import (
    count_targets,
    global_targets,
    per_sample_loss,
    weighted_loss,
)
from holdfast.objective.distill import Distill
from holdfast.objective.flow import Flow
from holdfast.objective.rehearsal import Rehearsal
from holdfast.objective.scores import Scores
from holdfast.objective.scoring import score
from holdfast.objective.uniform import Uniform
from holdfast.objective.weights import with_weights

__all__ = [
    "Distill",
    "Flow",
    "Rehearsal",
    "Scores",
    "Uniform",
    "count_targets",
    "global_targets",
    "pad_collate",
    "per_sample_loss",
    "score",
    "weighted_loss",
    "with_weights",
]
