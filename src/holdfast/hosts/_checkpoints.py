"""What a run goes on from: a file that is there whole or not at all, and safe to load.

And what the hosts share that have checkpoints of their own.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from holdfast._torch.checks import whole_number
from holdfast.io.files import write_whole
from holdfast.run import Run


class Due:
    """When to save: every so many updates and at the end, or after so much time.

    >>> due = Due(2, total=5)
    >>> [update for update in range(1, 6) if due(update)]
    [2, 4, 5]
    """

    def __init__(self, every: int | timedelta, total: int) -> None:
        self.every = every if isinstance(every, timedelta) else whole_number("save_every", every, 1)
        self.total, self.last = total, time.monotonic()

    def __call__(self, update: int) -> bool:
        """Whether it is time, after this update."""
        if not isinstance(self.every, timedelta):
            return update == self.total or update % self.every == 0
        now = time.monotonic()
        if now - self.last < self.every.total_seconds():
            return False
        self.last = now
        return True


def save(path: str | os.PathLike[str], run: Run, update: int, settings: dict[str, Any]) -> None:
    """Write all that a run needs to go on: what is trained, the optimizer, the random states."""
    state = {
        "run": run.identity(),
        "update": update,
        "settings": settings,
        "model": _tensors(run),
        "optimizer": run.optimizer.state_dict() if run.optimizer else {},
        "criterion": run.criterion.state_dict(),
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        write_whole(Path(path), lambda beside: torch.save(state, beside))
    except RuntimeError as error:  # torch's writer tells positions, not the reason
        raise OSError(f"{path} cannot be written: is the disk full?") from error


def load(path: str | os.PathLike[str], run: Run, settings: dict[str, Any]) -> int:
    """Go on from a file, if it is there. Returns the updates that are done."""
    if not Path(path).exists():
        return 0
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        saved, before = state["run"], state["settings"]
    except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
        raise ValueError(f"{path} is not a checkpoint of finetune_loop: {error}") from error
    run.check_identity(saved, str(path))
    check_settings(before, settings, str(path))
    own = _tensors(run)
    shapes = {name: tensor.shape for name, tensor in own.items()}
    if shapes != {name: tensor.shape for name, tensor in state["model"].items()}:
        raise ValueError(f"{path} is of another model, or of other parts that may change")
    if run.optimizer is not None:
        run.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(state["model"][name])
    run.criterion.load_state_dict(state["criterion"])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])
    return int(state["update"])


def check_settings(saved: dict[str, Any], ours: dict[str, Any], where: str) -> None:
    """Refuse to go on with other settings than those that were saved."""
    other = [name for name in ours if saved.get(name) != ours[name]]
    told = [f"{n}={saved.get(n)} there and {ours[n]} here" for n in other if n != "schedule"]
    if other:
        raise ValueError(
            f"{where} is of a run with other settings: {'; '.join(told) or 'another schedule'}. Go "
            "on with the same ones, or start a run of its own elsewhere"
        )


def newest_complete(folder: str) -> str | None:
    """The newest checkpoint of a Hugging Face Trainer that was written to its end, if there is one.

    The trainer writes ``trainer_state.json`` last.
    """

    def number(path: Path) -> int:
        return int(path.name.rpartition("-")[2])

    found = [p for p in Path(folder).glob("checkpoint-*") if p.name.rpartition("-")[2].isdigit()]
    for path in sorted(found, key=number, reverse=True):
        try:
            json.loads((path / "trainer_state.json").read_text())
        except (OSError, ValueError):
            continue
        return str(path)
    return None


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    """What training changes: the optimizer's parameters and the buffers that a model saves."""
    groups = run.optimizer.param_groups if run.optimizer else []
    trained = {id(p) for group in groups for p in group["params"]}
    saved = run.model.state_dict(keep_vars=True)
    named = {n: p.detach() for n, p in run.model.named_parameters() if id(p) in trained}
    return named | {n: b for n, b in run.model.named_buffers() if n in saved}


def of_all_ranks(state: Any) -> list[Any]:
    """What each rank has of a state of its own, by rank. All ranks must ask."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [state]
    states: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(states, state)
    return states


def of_this_rank(states: list[Any]) -> Any:
    """This rank's part; the first one's if there were fewer ranks."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    rank = torch.distributed.get_rank() if distributed else 0
    return states[rank if rank < len(states) else 0]
