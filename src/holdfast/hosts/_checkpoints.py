"""The state from which a run resumes: what every host saves, and the file of finetune_loop."""

import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from holdfast._torch.layout import gathered, rank_and_world
from holdfast.io.files import first_line, write_whole
from holdfast.run import Run

STATE_FILE = "holdfast.pt"  # beside the files of a host


def run_state(run: Run) -> dict[str, Any]:
    """The state that a host saves beside model and optimizer. All ranks must call it."""
    return {"run": run.identity(), "states": gathered(run.state_dict())}


def load_run_state(run: Run, state: dict[str, Any], where: str) -> None:
    """Check that a state belongs to this run, and load this rank's state of stage 2.

    If there were fewer ranks, the new ones take the state of rank 0.
    """
    run.check_identity(state["run"], where)
    (rank, _), states = rank_and_world(), state["states"]
    run.load_state_dict(states[rank if rank < len(states) else 0])


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


def save(path: str | os.PathLike[str], run: Run, update: int, settings: dict[str, Any]) -> None:
    """Write the whole state of a run to a file, atomically."""
    state = {
        "run": run.identity(),
        "states": [run.state_dict()],
        "update": update,
        "settings": settings,
        "model": _tensors(run),
        "optimizer": run.optimizer.state_dict() if run.optimizer else {},
        "random": torch.get_rng_state(),
        "random_cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_whole(Path(path), lambda beside: torch.save(state, beside))


def load(path: str | os.PathLike[str], run: Run, settings: dict[str, Any]) -> int:
    """Load the state of a run if the file exists. Returns the number of finished updates."""
    if not Path(path).exists():
        return 0
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file makes torch raise many types
        raise _damaged(path, first_line(error)) from error
    try:
        return _load(state, run, settings, str(path))
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if str(path) in str(error) or isinstance(error, torch.OutOfMemoryError):
            raise
        raise _damaged(path, f"{type(error).__name__} {first_line(error)}") from error


def _damaged(path: str | os.PathLike[str], why: str) -> ValueError:
    return ValueError(
        f"{path} is no checkpoint of finetune_loop, or damaged ({why}): remove it to start the run "
        "again"
    )


def _load(state: dict[str, Any], run: Run, settings: dict[str, Any], where: str) -> int:
    load_run_state(run, state, where)
    check_settings(state["settings"], settings, where)
    own, saved = _tensors(run), state["model"]
    if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
        raise ValueError(
            f"{where} was saved by a run of another model, or with other trained parameters"
        )
    if run.optimizer is not None:
        run.optimizer.load_state_dict(state["optimizer"])
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])
    torch.set_rng_state(state["random"])
    if state["random_cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random_cuda"])
    return int(state["update"])


def _tensors(run: Run) -> dict[str, torch.Tensor]:
    """The tensors that training changes: the optimizer's parameters and the saved buffers."""
    groups = run.optimizer.param_groups if run.optimizer else []
    trained = {id(p) for group in groups for p in group["params"]}
    saved = run.model.state_dict(keep_vars=True)
    named = {n: p.detach() for n, p in run.model.named_parameters() if id(p) in trained}
    return named | {n: b for n, b in run.model.named_buffers() if n in saved}
