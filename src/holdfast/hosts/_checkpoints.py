"""The state from which a run resumes: what every host saves, and the file ``run.pt``."""

import contextlib
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from holdfast._torch.layout import (
    gathered,
    is_sharded,
    like,
    rank_and_world,
    whole_on_first,
)
from holdfast.io.files import write_whole
from holdfast.run import Run

STATE_FILE = "holdfast.pt"  # beside the files of a host


def run_state(run: Run) -> dict[str, Any]:
    """The state that a host saves beside model and optimizer. All ranks must call it."""
    return {"run": run.identity(), "states": gathered(run.state_dict())}


def load_run_state(run: Run, state: dict[str, Any], where: str) -> None:
    """Check that a state belongs to this run, and load this rank's state of stage 2."""
    run.check_identity(state["run"], where)
    run.load_state_dict(_own(state["states"]))


def check_settings(saved: dict[str, Any], ours: dict[str, Any], where: str) -> None:
    other = [name for name in ours if saved.get(name) != ours[name]]
    told = [f"{n}={saved.get(n)} there and {ours[n]} here" for n in other if n != "schedule"]
    if other:
        raise ValueError(
            f"{where} was saved by a run with other settings: "
            f"{'; '.join(told) or 'another schedule'}. Resume with the same settings, or start a "
            "new run elsewhere"
        )


class Due:
    """Decides when to save: every N updates and at the end, or after some time.

    >>> due = Due(2, total=5)
    >>> [update for update in range(1, 6) if due(update)]
    [2, 4, 5]
    """

    def __init__(self, every: int | timedelta, total: int) -> None:
        self.every, self.total, self.last = every, total, time.monotonic()

    def __call__(self, update: int) -> bool:
        if not isinstance(self.every, timedelta):
            return update == self.total or update % self.every == 0
        now = time.monotonic()
        if now - self.last < self.every.total_seconds():
            return False
        self.last = now
        return True


class Stateful(Protocol):
    """A further part of a run that is saved and loaded with it."""

    def state(self) -> dict[str, Any]: ...

    def load(self, state: dict[str, Any]) -> None: ...


def save(
    path: str | os.PathLike[str],
    run: Run,
    update: int,
    settings: dict[str, Any],
    more: Stateful | None = None,
) -> None:
    """Write the whole state of a run to a file, atomically. All ranks must call it.

    Sharded tensors are saved whole, so the file does not depend on the sharding.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    state = run_state(run) | {
        "update": update,
        "settings": settings,
        "model": whole_state(trained_tensors(run)),
        "optimizer": whole_state(run.optimizer.state_dict()) if run.optimizer else {},
        "random": gathered(torch.get_rng_state()),
        "random_cuda": gathered(cuda),
        "more": more and more.state(),
    }
    if rank_and_world()[0] == 0:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(Path(path), lambda beside: torch.save(state, beside))


def saved_lr(path: str | os.PathLike[str]) -> float | None:
    """The learning rate of an unfinished run; None without one, or if its file is damaged."""
    with contextlib.suppress(Exception):  # a damaged file makes torch raise many types
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return float(state["settings"]["lr"])
    return None


def load(
    path: str | os.PathLike[str],
    run: Run,
    settings: dict[str, Any],
    more: Stateful | None = None,
) -> int:
    """Load the state of a run if the file exists. Returns the number of finished updates."""
    if not Path(path).exists():
        return 0
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file makes torch raise many types
        raise _damaged(path) from error
    try:
        return _load(state, run, settings, str(path), more)
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if str(path) in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise _damaged(path) from error


def _damaged(path: str | os.PathLike[str]) -> ValueError:
    # Not with torch's words, which advise to unpickle it.
    return ValueError(
        f"{path} is no checkpoint of a run, or damaged: remove it to start the run again"
    )


def _load(
    state: dict[str, Any], run: Run, settings: dict[str, Any], where: str, more: Stateful | None
) -> int:
    load_run_state(run, state, where)
    check_settings(state["settings"], settings, where)
    own, saved = trained_tensors(run), state["model"]
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
        raise ValueError(
            f"{where} was saved by a run of another model, or with other trained parameters"
        )
    if run.optimizer is not None:
        run.optimizer.load_state_dict(_sharded(state["optimizer"], run.optimizer))
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(like(saved[name], tensor))
    if more is not None:
        more.load(state["more"])
    cpu, cuda = _own(state["random"]), _own(state["random_cuda"])
    torch.set_rng_state(cpu)
    if cuda and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(cuda)
    return int(state["update"])


def _own(states: list[Any]) -> Any:
    """The state of this rank. If there were fewer ranks, the new ones take that of the first."""
    rank, _ = rank_and_world()
    return states[rank if rank < len(states) else 0]


def whole_state(state: Any) -> Any:
    """A state in which sharded tensors are whole, on the first rank only."""
    if isinstance(state, dict):
        return {name: whole_state(value) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(map(whole_state, state))
    return whole_on_first(state) if is_sharded(state) else state


def _sharded(state: dict[str, Any], optimizer: Optimizer) -> dict[str, Any]:
    """A saved state of an optimizer whose tensors are sharded as its parameters are."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of = dict(zip(numbers, params, strict=False))

    def shard(value: Any, p: Any) -> Any:
        fits = isinstance(value, Tensor) and is_sharded(p) and value.shape == p.shape
        return like(value, p, value.dtype) if fits else value

    values = {
        number: {name: shard(value, of.get(number)) for name, value in row.items()}
        for number, row in state["state"].items()
    }
    return {**state, "state": values}


def trained_tensors(run: Run) -> dict[str, torch.Tensor]:
    """The tensors that training changes: the optimizer's parameters and the saved buffers."""
    groups = run.optimizer.param_groups if run.optimizer else []
    trained = {id(p) for group in groups for p in group["params"]}
    saved = run.model.state_dict(keep_vars=True)
    named = {n: p.detach() for n, p in run.model.named_parameters() if id(p) in trained}
    return named | {n: b for n, b in run.model.named_buffers() if n in saved}
