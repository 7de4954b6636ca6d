"""The registry of methods: name, stage, class, paper and summary of each.

The tables of all pages are generated from it. A new method is one file and one line here; see
CONTRIBUTING.md.
"""

import re
from dataclasses import dataclass
from typing import Literal

from holdfast._torch.checks import did_you_mean
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
from holdfast.methods.finch import FinchUpdate
from holdfast.methods.flow import Flow
from holdfast.methods.gradual_unfreezing import GradualUnfreezing
from holdfast.methods.hft import HFT
from holdfast.methods.identity import Full, Keep, NoRecall, Pretrained, Uniform
from holdfast.methods.l1_sp import L1SP
from holdfast.methods.l2_sp import L2SP
from holdfast.methods.linear_probe import LinearProbe
from holdfast.methods.lines import LiNeS
from holdfast.methods.lora import LoRA
from holdfast.methods.lp_ft import LPFT
from holdfast.methods.mas import MAS
from holdfast.methods.mixout import Mixout
from holdfast.methods.model_stock import ModelStock
from holdfast.methods.mofo import MoFOUpdate
from holdfast.methods.osft import OSFT
from holdfast.methods.random_init import RandomInit
from holdfast.methods.recadam import RecAdamUpdate
from holdfast.methods.rehearsal import Rehearsal
from holdfast.methods.self_replay import SelfReplay
from holdfast.methods.sfa import SFA
from holdfast.methods.sgd import SGDUpdate
from holdfast.methods.slerp import SLERP
from holdfast.methods.spd import SPDUpdate
from holdfast.methods.stm import STM
from holdfast.methods.talr import TALR
from holdfast.methods.ties import TIES
from holdfast.methods.tmkl import TMKL
from holdfast.methods.wise_ft import WiseFT
from holdfast.stages import Merging, Method, Objective, Penalty, Recall, Start, Trainable, Update

__all__ = ["PRESETS", "STAGES", "Entry", "Stage", "entry_of", "find", "methods", "register"]

Stage = Literal["trainable", "start", "objective", "recall", "update", "penalties", "merging"]
#: The base class of each stage, in the order of the stages.
STAGES: dict[Stage, type[Method]] = {
    "trainable": Trainable, "start": Start, "objective": Objective, "recall": Recall,
    "update": Update, "penalties": Penalty, "merging": Merging,
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A registered method.

    Attributes:
        name: the name in recipe files and presets.
        stage: the field of :class:`~holdfast.Recipe` that holds the method.
        cls: the class.
        paper: an arXiv number or a URL; empty if there is no paper.
        summary: one line of text.
    """

    name: str
    stage: Stage
    cls: type[Method]
    paper: str
    summary: str

    @property
    def url(self) -> str:
        """The URL of the paper."""
        arxiv = re.fullmatch(r"\d{4}\.\d{5}", self.paper)
        return f"https://arxiv.org/abs/{self.paper}" if arxiv else self.paper


#: Presets that are not named like a method: the methods of each, with their settings.
PRESETS: dict[str, tuple[Method, ...]] = {
    "standard": (),
    "holdfast": (Auto(),),
    "asft": (DFT(), Distill(strength=0.05, temperature=1.0)),  # https://arxiv.org/abs/2509.23753
    "dora": (LoRA(dora=True),),  # https://arxiv.org/abs/2402.09353
    "rslora": (LoRA(rslora=True),),  # https://arxiv.org/abs/2312.03732
    "oft": (Adapter("oft"),),  # https://arxiv.org/abs/2306.07280
    "hra": (Adapter("hra"),),  # https://arxiv.org/abs/2405.17484
    "ia3": (Adapter("ia3"),),  # https://arxiv.org/abs/2205.05638
    "vera": (Adapter("vera"),),  # https://arxiv.org/abs/2310.11454
    "loha": (Adapter("loha"),),  # https://arxiv.org/abs/2108.06098
    "lokr": (Adapter("lokr"),),  # https://arxiv.org/abs/2309.14859
}

_entries: dict[str, Entry] = {}


def register(name: str, stage: Stage, cls: type[Method], paper: str, summary: str) -> Entry:
    """Register a method. A name or class that is already registered raises a ValueError."""
    if stage not in STAGES:
        raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
    if name != _normal(name):
        raise ValueError(
            f"a name consists of a-z, 0-9 and hyphens, got {name!r}: use {_normal(name)!r}"
        )
    for known in _entries.values():
        if known.name == name or known.cls is cls:
            raise ValueError(f"{name!r} ({cls.__name__}) is already registered as {known}")
    _entries[name] = Entry(name, stage, cls, paper, summary)
    return _entries[name]


def methods(stage: Stage | None = None) -> list[Entry]:
    """All methods by stage, in the order of registration.

    >>> [entry.name for entry in methods("start")]
    ['pretrained', 'random-init']
    """
    return [e for s in STAGES if stage in (None, s) for e in _entries.values() if e.stage == s]


def find(name: str, stage: Stage | None = None) -> Entry:
    """Find a method by its name in any spelling. An unknown name raises and suggests others.

    >>> find("WiSE_FT").cls.__name__
    'WiseFT'
    """
    entry = _entries.get(_normal(name))
    if entry is None:
        entry = {e.cls.__name__.lower(): e for e in _entries.values()}.get(name.lower())
    if entry is None:
        known = [e.name for e in methods(stage)] + list(() if stage else PRESETS)
        what = "method" if stage is None else f"method of the stage {stage}"
        raise ValueError(f"unknown {what} {name!r}{did_you_mean(_normal(name), known, cutoff=0.6)}")
    if stage not in (None, entry.stage):
        raise ValueError(
            f"{entry.name} belongs to the stage {entry.stage}, not {stage}: write "
            f"{entry.stage}: {entry.name}"
        )
    return entry


def entry_of(method: Method) -> Entry:
    """The entry of a method."""
    for entry in _entries.values():
        if entry.cls is type(method):
            return entry
    raise ValueError(f"{type(method).__name__} is not registered: call holdfast.registry.register")


def _normal(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.strip().lower()).strip("-")


# fmt: off
register("full", "trainable", Full, "", "everything may change")
register("linear-probe", "trainable", LinearProbe, "2202.10054", "only the head; the body is frozen")
register("lp-ft", "trainable", LPFT, "2202.10054", "fit the head on frozen features first, then train everything")
register("hft", "trainable", HFT, "2404.18466", "a random half of each layer's matrices is frozen")
register("gradual-unfreezing", "trainable", GradualUnfreezing, "1801.06146", "unfreeze one layer after another, starting with the head")
register("osft", "trainable", OSFT, "2504.07097", "directions of the largest singular values stay; the others are trained")
register("lora", "trainable", LoRA, "2106.09685", "low-rank adapters beside frozen weights, through PEFT")
register("adapter", "trainable", Adapter, "https://huggingface.co/docs/peft", "any adapter of PEFT that changes layers: OFT, IA³, VeRA, LoHa, HRA, …")
register("mixout", "trainable", Mixout, "1909.11299", "in each forward pass, a random share of the weights is set to the pretrained ones")
register("pretrained", "start", Pretrained, "", "start from the pretrained weights")
register("random-init", "start", RandomInit, "2004.12651", "start from random weights and be pulled to the pretrained ones")
register("uniform", "objective", Uniform, "", "every sample counts the same")
register("flow", "objective", Flow, "2502.02797", "weight each sample by exp(−loss / τ), with its loss under the pretrained model")
register("stm", "objective", STM, "2501.14315", "leave out the tokens that the pretrained model finds unlikely")
register("dft", "objective", DFT, "2508.05629", "weight each token by its probability under the model in training")
register("talr", "objective", TALR, "2509.20758", "weight each token by p^(1/τ), with its probability p under the model in training")
register("eaft", "objective", EAFT, "2601.02151", "weight each token by the entropy of the model's prediction")
register("no-recall", "recall", NoRecall, "", "the loss preserves no old knowledge")
register("auto", "recall", Auto, "", "the recall that fits the model, as in the preset `holdfast`")
register("self-replay", "recall", SelfReplay, "2605.26097", "preserve the predictions on texts sampled from the pretrained model itself")
register("distill", "recall", Distill, "1606.09282", "stay near the pretrained model's predictions on the new data (LwF)")
register("tmkl", "recall", TMKL, "2605.29498", "stay near the pretrained model's predictions of all tokens but the target")
register("features", "recall", Features, "2308.13320", "keep the features that the head reads, on variations of the new inputs (LDIFS)")
register("rehearsal", "recall", Rehearsal, "2004.12651", "train on data of the old task as well, with a shift from old to new")
register("adamw", "update", AdamWUpdate, "1711.05101", "AdamW")
register("sgd", "update", SGDUpdate, "", "SGD with momentum")
register("recadam", "update", RecAdamUpdate, "2004.12651", "Adam with a decoupled, annealed pull to the pretrained weights")
register("mofo", "update", MoFOUpdate, "2407.20999", "Adam that moves only the coordinates with the largest momentum")
register("spd", "update", SPDUpdate, "2411.01713", "Adam that takes back steps away from the pretrained weights if the gradient points back")
register("finch", "update", FinchUpdate, "2605.20005", "AdamW whose learning rate falls as the loss of the update rises")
register("l2-sp", "penalties", L2SP, "1802.01483", "a quadratic penalty on the distance to the pretrained weights")
register("l1-sp", "penalties", L1SP, "1802.01483", "an L1 penalty on the distance to the pretrained weights: small changes become exactly 0")
register("ewc", "penalties", EWC, "1612.00796", "a quadratic penalty weighted by the Fisher information")
register("mas", "penalties", MAS, "1711.09601", "a quadratic penalty weighted by how much the outputs depend on a weight")
register("sfa", "penalties", SFA, "2501.05559", "average with the pretrained weights a few times during training")
register("keep", "merging", Keep, "", "keep the tuned model")
register("wise-ft", "merging", WiseFT, "2109.01903", "keep a point between the pretrained and the tuned weights")
register("lines", "merging", LiNeS, "2410.17146", "scale the update of each block by its depth: the first blocks stay near the base")
register("ties", "merging", TIES, "2306.01708", "keep the largest changes of each tensor; of several models, those that agree in sign")
register("dare", "merging", DARE, "2311.03099", "drop a random share of the changes, and enlarge the others in proportion")
register("fapm", "merging", FAPM, "2509.08255", "keep the changes that are large but small beside their weight")
register("slerp", "merging", SLERP, "https://doi.org/10.1145/325334.325242", "interpolate on the arc between the pretrained and the tuned weights")
register("model-stock", "merging", ModelStock, "2403.19522", "average tuned models, and go back to the base as their angle says")
