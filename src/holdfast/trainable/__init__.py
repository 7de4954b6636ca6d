"""Stage 1, trainable: what may change, and from where it starts."""

from holdfast.trainable.full import Full
from holdfast.trainable.gradual import GradualUnfreezing
from holdfast.trainable.half import HalfFineTuning
from holdfast.trainable.linear_probe import PretrainedHead, linear_probe
from holdfast.trainable.linear_probing import LinearProbe
from holdfast.trainable.lora import LoRA, adapters_off
from holdfast.trainable.lpft import LPFT
from holdfast.trainable.mixout import Mixout
from holdfast.trainable.pretrained import Pretrained
from holdfast.trainable.random_init import RandomInit, random_init

__all__ = [
    "LPFT",
    "Full",
    "GradualUnfreezing",
    "HalfFineTuning",
    "LinearProbe",
    "LoRA",
    "Mixout",
    "Pretrained",
    "PretrainedHead",
    "RandomInit",
    "adapters_off",
    "linear_probe",
    "random_init",
]
