r"""λ(t), the shift of the objective from recalling to learning.

The training objective is λ(t)·Loss_T + (1−λ(t))·Loss_S. Near λ = 0 the model recalls its pretrained
weights; at λ = 1 it only learns the target task. ``t`` is 1 at the first update.

    >>> from holdfast.anneal import Sigmoid
    >>> Sigmoid(k=0.1, t0=250)(250)
    0.5
    >>> Sigmoid.over(total_steps=1000, t0=0.25, width=0.01)
    Sigmoid(k=0.1, t0=250.0)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, overload

import torch
from torch import Tensor

from holdfast._torch.checks import NamedSettings, above_zero, at_least_zero, did_you_mean, share

__all__ = ["Anneal", "Constant", "Linear", "Sigmoid"]


@dataclass(frozen=True)
class Anneal(NamedSettings, ABC):
    """Base of the annealing functions: frozen, comparable, called with the update count ``t``.

    To add one, define a frozen dataclass with the method ``_at``, where ``t`` is a float or a 0-dim
    float64 tensor (a tensor if the step is compiled or captured into a CUDA graph).
    """

    _known: ClassVar[dict[str, type[Anneal]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        known = Anneal._known.setdefault(cls.__name__, cls)
        if (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            # Checkpoints refer to the class by name, so the name must be unique.
            raise TypeError(f"an annealing named {cls.__name__} exists already: choose another")
        Anneal._known[cls.__name__] = cls

    @overload
    def __call__(self, t: int | float) -> float: ...
    @overload
    def __call__(self, t: Tensor) -> Tensor: ...
    def __call__(self, t: int | float | Tensor) -> float | Tensor:
        """λ at update ``t``: a float for a number, a 0-dim float64 tensor for a tensor."""
        lam: float | Tensor = self._at(t.double() if isinstance(t, Tensor) else float(t))
        return lam

    @abstractmethod
    def _at(self, t: Any) -> Any: ...

    def to_dict(self) -> dict[str, Any]:
        """Plain Python values, for checkpoints and configuration files."""
        return {"name": type(self).__name__, **asdict(self)}

    @staticmethod
    def from_dict(saved: dict[str, Any]) -> Anneal:
        """The inverse of :meth:`to_dict`, for classes that are defined in this process."""
        fields = dict(saved)
        name = fields.pop("name", None)
        if name not in Anneal._known:
            raise ValueError(f"unknown annealing {name!r}{did_you_mean(str(name), Anneal._known)}")
        return Anneal._known[name](**fields)


def check_anneal(name: str, value: Any) -> Anneal:
    """Return the value, or raise TypeError if it is not an annealing."""
    if not isinstance(value, Anneal):
        raise TypeError(
            f"{name} must be an annealing such as Sigmoid(k=0.1, t0=250) or Constant(0.5) of "
            f"holdfast.anneal, got {value!r}"
        )
    return value


@dataclass(frozen=True)
class Sigmoid(Anneal):
    r"""λ(t) = 1 / (1 + exp(−k·(t − t0))): the paper's annealing.

    Args:
        k: slope, in 1/updates. 0 keeps λ at ½. A large ``k`` makes λ jump at ``t0``.
        t0: the update at which λ = ½.
    """

    k: float = 0.1
    t0: float = 250.0

    def __post_init__(self) -> None:
        # As plain floats: numpy's floats in a checkpoint would not load with weights_only.
        object.__setattr__(self, "k", at_least_zero("k", self.k))
        object.__setattr__(self, "t0", at_least_zero("t0", self.t0))

    def _at(self, t: Any) -> Any:
        x = self.k * (t - self.t0)
        if isinstance(x, Tensor):
            return torch.sigmoid(x)
        # The argument of exp is never positive, so no k and t can overflow it.
        e = math.exp(-abs(x))
        return 1.0 / (1.0 + e) if x >= 0 else e / (1.0 + e)

    @classmethod
    def over(cls, total_steps: int, *, t0: float = 0.3, width: float = 0.1) -> Sigmoid:
        """A sigmoid over a run: ``t0`` and ``width`` = 1/k are fractions of its length."""
        length = above_zero("total_steps", total_steps)
        return cls(k=1.0 / (above_zero("width", width) * length), t0=_fraction("t0", t0) * length)


@dataclass(frozen=True)
class Linear(Anneal):
    """λ(t) = min(1, t / t0): a linear shift from recalling to learning until update ``t0``."""

    t0: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "t0", at_least_zero("t0", self.t0))

    def _at(self, t: Any) -> Any:
        if isinstance(t, Tensor):
            return torch.ones_like(t) if self.t0 == 0 else (t / self.t0).clamp(max=1.0)
        return 1.0 if t >= self.t0 else t / self.t0

    @classmethod
    def over(cls, total_steps: int, *, t0: float = 0.5) -> Linear:
        """A line over a run: ``t0`` is a fraction of its length."""
        return cls(t0=_fraction("t0", t0) * above_zero("total_steps", total_steps))


@dataclass(frozen=True)
class Constant(Anneal):
    """λ(t) = lam: a pull of constant strength. ``Constant(1.0)`` is no pull."""

    lam: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "lam", share("lam", self.lam))

    def _at(self, t: Any) -> Any:
        return torch.full_like(t, self.lam) if isinstance(t, Tensor) else self.lam


def _fraction(name: str, value: float) -> float:
    if at_least_zero(name, value) > 1:
        raise ValueError(f"{name} must be a fraction of the run, between 0 and 1, got {value!r}")
    return float(value)
