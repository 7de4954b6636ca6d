"""Fine-tune a pretrained model without making it forget, when all you have is its weights."""

from holdfast import anneal, optim, registry
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from holdfast.data import pad_collate
from holdfast.hosts.raw import finetune_loop
from holdfast.losses import count_targets, global_targets, per_sample_loss, weighted_loss
from holdfast.merging import Keep, WiseFT
from holdfast.objective import Distill, Flow, Rehearsal, Scores, Uniform, score, with_weights
from holdfast.optim import (
    EWC,
    L1SP,
    L2SP,
    MAS,
    AdamWUpdate,
    MoFO,
    MoFOUpdate,
    PeriodicAverage,
    RecAdam,
    RecAdamUpdate,
    SGDUpdate,
)
from holdfast.recipe import Recipe
from holdfast.reference import Distance, Reference
from holdfast.run import Run
from holdfast.trainable import (
    LPFT,
    Full,
    GradualUnfreezing,
    HalfFineTuning,
    LinearProbe,
    LoRA,
    Mixout,
    Pretrained,
    PretrainedHead,
    RandomInit,
    linear_probe,
    random_init,
)

__version__ = "0.1.0"

__all__ = [
    "EWC",
    "L1SP",
    "L2SP",
    "LPFT",
    "MAS",
    "AdamWUpdate",
    "Anneal",
    "Constant",
    "Distance",
    "Distill",
    "Flow",
    "Full",
    "GradualUnfreezing",
    "HalfFineTuning",
    "Keep",
    "Linear",
    "LinearProbe",
    "LoRA",
    "Mixout",
    "MoFO",
    "MoFOUpdate",
    "PeriodicAverage",
    "Pretrained",
    "PretrainedHead",
    "RandomInit",
    "RecAdam",
    "RecAdamUpdate",
    "Recipe",
    "Reference",
    "Rehearsal",
    "Run",
    "SGDUpdate",
    "Scores",
    "Sigmoid",
    "Uniform",
    "WiseFT",
    "anneal",
    "count_targets",
    "finetune_loop",
    "global_targets",
    "linear_probe",
    "optim",
    "pad_collate",
    "per_sample_loss",
    "random_init",
    "registry",
    "score",
    "weighted_loss",
    "with_weights",
]
