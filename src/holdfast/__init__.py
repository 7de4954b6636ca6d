"""Fine-tune a pretrained model without making it forget, when all you have is its weights."""

from holdfast import anneal, optim
from holdfast.anneal import Anneal, Constant, Linear, Sigmoid
from holdfast.optim import RecAdam
from holdfast.reference import Distance, Reference
from holdfast.trainable import random_init

__version__ = "0.1.0"

__all__ = [
    "Anneal",
    "Constant",
    "Distance",
    "Linear",
    "RecAdam",
    "Reference",
    "Sigmoid",
    "anneal",
    "optim",
    "random_init",
]
