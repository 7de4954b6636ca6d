"""Fine-tune a pretrained model without making it forget, when all you have is its weights.

    model = holdfast.finetune_loop(model, "holdfast", data, tokenizer=tokenizer)
    print(holdfast.measure("base", model, target="dev.jsonl", text="wiki.txt").verdict())

Fine-tune   finetune_loop, a training loop; train_loop for a Run of your own; LoopSettings
Compose     Recipe("recadam+flow") joins presets, Recipe(recall=SelfReplay(), merging=WiseFT())
            methods: one class each, which `holdfast methods` and registry list by stage
Measure     measure and measure_many return a ForgettingReport; Watch measures during training;
            Loader says how models are loaded
Compare     compare runs a Plan (Training, Measuring) and returns Results; tune searches the best
            recipe and its settings as a Tuning says, and returns Tuned
Trainers    HoldfastTrainer and WithRecipe (transformers), HoldfastSFTTrainer (TRL), RecipeCallback
            (Lightning), AccelerateLoop; all others are in holdfast.hosts; Tracking
Data        preview shows what a model would learn (Preview); score weighs samples (Scores);
            pad_collate, with_weights
Parts       the optimizers in optim; per_sample_loss, weighted_loss, count_targets, global_targets;
            Reference and Distance; linear_probe, random_init, PretrainedHead, adapters_off, anneal

help(holdfast.NAME) explains a name, `holdfast --help` lists the commands. As the name of a model,
of data or of texts, "builtin" stands for small ones that come with holdfast.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast._torch.version import __version__ as __version__

if TYPE_CHECKING:
    from holdfast import anneal, optim, registry
    from holdfast._torch.adapters import adapters_off
    from holdfast._torch.pretrained_head import PretrainedHead
    from holdfast.columns import with_weights
    from holdfast.comparison.plan import Measuring, Plan
    from holdfast.comparison.results import Results
    from holdfast.comparison.scheduler import compare
    from holdfast.comparison.search import Tuning
    from holdfast.comparison.tuning import Tuned, tune
    from holdfast.data import pad_collate
    from holdfast.evaluate.measure import measure, measure_many
    from holdfast.evaluate.preview import Preview, preview
    from holdfast.evaluate.report import ForgettingReport
    from holdfast.evaluate.watch import Watch
    from holdfast.hosts._driving import LoopSettings
    from holdfast.hosts.accelerate import AccelerateLoop as AccelerateLoop
    from holdfast.hosts.hf import HoldfastTrainer as HoldfastTrainer
    from holdfast.hosts.hf import WithRecipe as WithRecipe
    from holdfast.hosts.job import Training
    from holdfast.hosts.lightning import RecipeCallback as RecipeCallback
    from holdfast.hosts.raw import finetune_loop, train_loop
    from holdfast.hosts.tracking import Tracking
    from holdfast.hosts.trl import HoldfastSFTTrainer as HoldfastSFTTrainer
    from holdfast.io.models import Loader
    from holdfast.losses import count_targets, global_targets, per_sample_loss, weighted_loss
    from holdfast.methods.adamw import AdamWUpdate
    from holdfast.methods.adapter import Adapter
    from holdfast.methods.auto import Auto
    from holdfast.methods.dare import DARE
    from holdfast.methods.dft import DFT
    from holdfast.methods.distill import Distill
    from holdfast.methods.eaft import EAFT
    from holdfast.methods.ewc import EWC
    from holdfast.methods.fapm import FAPM
    from holdfast.methods.features import Features
    from holdfast.methods.finch import Finch, FinchUpdate
    from holdfast.methods.flow import Flow
    from holdfast.methods.gradual_unfreezing import GradualUnfreezing
    from holdfast.methods.hft import HFT
    from holdfast.methods.identity import Full, Keep, NoRecall, Pretrained, Uniform
    from holdfast.methods.l1_sp import L1SP
    from holdfast.methods.l2_sp import L2SP
    from holdfast.methods.linear_probe import LinearProbe, linear_probe
    from holdfast.methods.lines import LiNeS
    from holdfast.methods.lora import LoRA
    from holdfast.methods.lp_ft import LPFT
    from holdfast.methods.mas import MAS
    from holdfast.methods.mixout import Mixout
    from holdfast.methods.model_stock import ModelStock
    from holdfast.methods.mofo import MoFO, MoFOUpdate
    from holdfast.methods.osft import OSFT
    from holdfast.methods.random_init import RandomInit, random_init
    from holdfast.methods.recadam import RecAdam, RecAdamUpdate
    from holdfast.methods.rehearsal import Rehearsal
    from holdfast.methods.self_replay import SelfReplay
    from holdfast.methods.sfa import SFA
    from holdfast.methods.sgd import SGDUpdate
    from holdfast.methods.slerp import SLERP
    from holdfast.methods.spd import SPD, SPDUpdate
    from holdfast.methods.stm import STM
    from holdfast.methods.talr import TALR
    from holdfast.methods.ties import TIES
    from holdfast.methods.tmkl import TMKL
    from holdfast.methods.wise_ft import WiseFT
    from holdfast.recipe import Recipe
    from holdfast.reference import Distance, Reference
    from holdfast.run import Run
    from holdfast.scoring.scorer import score
    from holdfast.scoring.scores import Scores

    __all__ = [
        "DARE", "DFT", "EAFT", "EWC", "FAPM", "HFT", "L1SP", "L2SP", "LPFT", "MAS", "OSFT", "SFA",
        "SLERP", "SPD", "STM", "TALR", "TIES", "TMKL", "AdamWUpdate", "Adapter", "Auto", "Distance",
        "Distill", "Features", "Finch", "FinchUpdate", "Flow", "ForgettingReport", "Full",
        "GradualUnfreezing", "Keep", "LiNeS", "LinearProbe", "LoRA", "Loader", "LoopSettings",
        "Measuring", "Mixout", "MoFO", "MoFOUpdate", "ModelStock", "NoRecall", "Plan", "Pretrained",
        "PretrainedHead", "Preview", "RandomInit", "RecAdam", "RecAdamUpdate", "Recipe",
        "Reference", "Rehearsal", "Results", "Run", "SGDUpdate", "SPDUpdate", "Scores",
        "SelfReplay", "Tracking", "Training", "Tuned", "Tuning", "Uniform", "Watch", "WiseFT",
        "adapters_off", "anneal", "compare", "count_targets", "finetune_loop", "global_targets",
        "linear_probe", "measure", "measure_many", "optim", "pad_collate", "per_sample_loss",
        "preview", "random_init", "registry", "score", "train_loop", "tune", "weighted_loss",
        "with_weights",
    ]  # fmt: skip
else:
    #: What `help` explains and a star imports; type checkers see all names.
    __all__ = ["compare", "finetune_loop", "measure", "tune"]

#: The public names of each module, which is imported on first use: `import holdfast` takes no time.
_PUBLIC = {
    "holdfast._torch.adapters": "adapters_off",
    "holdfast._torch.pretrained_head": "PretrainedHead",
    "holdfast.anneal": "anneal",
    "holdfast.columns": "with_weights",
    "holdfast.comparison.plan": "Measuring Plan",
    "holdfast.comparison.results": "Results",
    "holdfast.comparison.scheduler": "compare",
    "holdfast.comparison.search": "Tuning",
    "holdfast.comparison.tuning": "Tuned tune",
    "holdfast.data": "pad_collate",
    "holdfast.evaluate.measure": "measure measure_many",
    "holdfast.evaluate.preview": "Preview preview",
    "holdfast.evaluate.report": "ForgettingReport",
    "holdfast.evaluate.watch": "Watch",
    "holdfast.hosts.job": "Training",
    "holdfast.hosts._driving": "LoopSettings",
    "holdfast.hosts.raw": "finetune_loop train_loop",
    "holdfast.hosts.tracking": "Tracking",
    "holdfast.io.models": "Loader",
    "holdfast.losses": "count_targets global_targets per_sample_loss weighted_loss",
    "holdfast.methods.adamw": "AdamWUpdate",
    "holdfast.methods.adapter": "Adapter",
    "holdfast.methods.auto": "Auto",
    "holdfast.methods.dare": "DARE",
    "holdfast.methods.dft": "DFT",
    "holdfast.methods.distill": "Distill",
    "holdfast.methods.eaft": "EAFT",
    "holdfast.methods.ewc": "EWC",
    "holdfast.methods.fapm": "FAPM",
    "holdfast.methods.features": "Features",
    "holdfast.methods.finch": "Finch FinchUpdate",
    "holdfast.methods.flow": "Flow",
    "holdfast.methods.gradual_unfreezing": "GradualUnfreezing",
    "holdfast.methods.hft": "HFT",
    "holdfast.methods.identity": "Full Keep NoRecall Pretrained Uniform",
    "holdfast.methods.l1_sp": "L1SP",
    "holdfast.methods.l2_sp": "L2SP",
    "holdfast.methods.linear_probe": "LinearProbe linear_probe",
    "holdfast.methods.lines": "LiNeS",
    "holdfast.methods.lora": "LoRA",
    "holdfast.methods.lp_ft": "LPFT",
    "holdfast.methods.mas": "MAS",
    "holdfast.methods.mixout": "Mixout",
    "holdfast.methods.model_stock": "ModelStock",
    "holdfast.methods.mofo": "MoFO MoFOUpdate",
    "holdfast.methods.osft": "OSFT",
    "holdfast.methods.random_init": "RandomInit random_init",
    "holdfast.methods.recadam": "RecAdam RecAdamUpdate",
    "holdfast.methods.rehearsal": "Rehearsal",
    "holdfast.methods.self_replay": "SelfReplay",
    "holdfast.methods.sfa": "SFA",
    "holdfast.methods.sgd": "SGDUpdate",
    "holdfast.methods.slerp": "SLERP",
    "holdfast.methods.spd": "SPD SPDUpdate",
    "holdfast.methods.stm": "STM",
    "holdfast.methods.talr": "TALR",
    "holdfast.methods.ties": "TIES",
    "holdfast.methods.tmkl": "TMKL",
    "holdfast.methods.wise_ft": "WiseFT",
    "holdfast.optim": "optim",
    "holdfast.recipe": "Recipe",
    "holdfast.reference": "Distance Reference",
    "holdfast.registry": "registry",
    "holdfast.run": "Run",
    "holdfast.scoring.scorer": "score",
    "holdfast.scoring.scores": "Scores",
}
_LAZY = {name: module for module, names in _PUBLIC.items() for name in names.split()}
#: Hosts need a framework, so they are not imported by ``dir`` and ``help``.
_HOSTS = {
    "AccelerateLoop": "holdfast.hosts.accelerate",
    "HoldfastSFTTrainer": "holdfast.hosts.trl",
    "HoldfastTrainer": "holdfast.hosts.hf",
    "RecipeCallback": "holdfast.hosts.lightning",
    "WithRecipe": "holdfast.hosts.hf",
}


def __getattr__(name: str) -> Any:
    module = {**_LAZY, **_HOSTS}.get(name)
    if module is None:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    found = import_module(module)
    return found if module == f"{__name__}.{name}" else getattr(found, name)


def __dir__() -> list[str]:
    return sorted([*_LAZY, *(name for name in globals() if name.startswith("__"))])
