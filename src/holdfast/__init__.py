"""Fine-tune a pretrained model without making it forget, when all you have is its weights."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast import anneal, optim, registry
from holdfast._torch.adapters import adapters_off
from holdfast._torch.pretrained_head import PretrainedHead
from holdfast._torch.version import __version__ as __version__
from holdfast.columns import with_weights
from holdfast.data import pad_collate
from holdfast.hosts.raw import LoopSettings, finetune_loop, train_loop
from holdfast.losses import count_targets, global_targets, per_sample_loss, weighted_loss
from holdfast.methods.adamw import AdamWUpdate
from holdfast.methods.auto import Auto
from holdfast.methods.distill import Distill
from holdfast.methods.ewc import EWC
from holdfast.methods.features import Features
from holdfast.methods.flow import Flow
from holdfast.methods.gradual_unfreezing import GradualUnfreezing
from holdfast.methods.hft import HFT
from holdfast.methods.identity import Full, Keep, NoRecall, Pretrained, Uniform
from holdfast.methods.l1_sp import L1SP
from holdfast.methods.l2_sp import L2SP
from holdfast.methods.linear_probe import LinearProbe, linear_probe
from holdfast.methods.lora import LoRA
from holdfast.methods.lp_ft import LPFT
from holdfast.methods.mas import MAS
from holdfast.methods.mixout import Mixout
from holdfast.methods.mofo import MoFO, MoFOUpdate
from holdfast.methods.random_init import RandomInit, random_init
from holdfast.methods.recadam import RecAdam, RecAdamUpdate
from holdfast.methods.rehearsal import Rehearsal
from holdfast.methods.self_replay import SelfReplay
from holdfast.methods.sfa import SFA
from holdfast.methods.sgd import SGDUpdate
from holdfast.methods.wise_ft import WiseFT
from holdfast.recipe import Recipe
from holdfast.reference import Distance, Reference
from holdfast.run import Run
from holdfast.scoring.scorer import score
from holdfast.scoring.scores import Scores

if TYPE_CHECKING:
    from holdfast.comparison.plan import Measuring, Plan
    from holdfast.comparison.results import Results
    from holdfast.comparison.scheduler import compare
    from holdfast.comparison.search import Tuning
    from holdfast.comparison.tuning import Tuned, tune
    from holdfast.evaluate.measure import measure, measure_many
    from holdfast.evaluate.report import ForgettingReport
    from holdfast.evaluate.watch import Watch
    from holdfast.hosts.accelerate import AccelerateLoop as AccelerateLoop
    from holdfast.hosts.hf import HoldfastTrainer as HoldfastTrainer
    from holdfast.hosts.hf import WithRecipe as WithRecipe
    from holdfast.hosts.job import Training
    from holdfast.hosts.lightning import RecipeCallback as RecipeCallback
    from holdfast.hosts.trl import HoldfastSFTTrainer as HoldfastSFTTrainer
    from holdfast.io.models import Loader

#: Imported on first use. A host needs its framework, so hosts are not part of ``__all__``.
_LAZY = {
    "AccelerateLoop": "holdfast.hosts.accelerate",
    "ForgettingReport": "holdfast.evaluate.report",
    "HoldfastSFTTrainer": "holdfast.hosts.trl",
    "HoldfastTrainer": "holdfast.hosts.hf",
    "Loader": "holdfast.io.models",
    "Measuring": "holdfast.comparison.plan",
    "Plan": "holdfast.comparison.plan",
    "RecipeCallback": "holdfast.hosts.lightning",
    "Results": "holdfast.comparison.results",
    "Training": "holdfast.hosts.job",
    "Tuned": "holdfast.comparison.tuning",
    "Tuning": "holdfast.comparison.search",
    "Watch": "holdfast.evaluate.watch",
    "WithRecipe": "holdfast.hosts.hf",
    "compare": "holdfast.comparison.scheduler",
    "measure": "holdfast.evaluate.measure",
    "measure_many": "holdfast.evaluate.measure",
    "tune": "holdfast.comparison.tuning",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


__all__ = [
    "EWC", "HFT", "L1SP", "L2SP", "LPFT", "MAS", "SFA", "AdamWUpdate", "Auto", "Distance",
    "Distill", "Features", "Flow", "ForgettingReport", "Full", "GradualUnfreezing", "Keep",
    "LinearProbe", "LoRA", "Loader", "LoopSettings", "Measuring", "Mixout", "MoFO",
    "MoFOUpdate", "NoRecall", "Plan", "Pretrained", "PretrainedHead", "RandomInit", "RecAdam",
    "RecAdamUpdate", "Recipe", "Reference", "Rehearsal", "Results", "Run", "SGDUpdate",
    "Scores", "SelfReplay", "Training", "Tuned", "Tuning", "Uniform", "Watch", "WiseFT",
    "adapters_off", "anneal", "compare", "count_targets", "finetune_loop", "global_targets",
    "linear_probe", "measure", "measure_many", "optim", "pad_collate", "per_sample_loss",
    "random_init", "registry", "score", "train_loop", "tune", "weighted_loss", "with_weights",
]  # fmt: skip
