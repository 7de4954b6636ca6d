"""The Optuna study behind ``tune``: where it is kept, which trials count, and what is hopeless.

Everything is in the study, results too: machines that share its storage share the search.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["counted", "hopeless", "open_study", "place_of", "revive"]


def open_study(storage: str, name: str) -> Any:
    """The study at a storage: the path of a journal file, or the URL of a database."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError('the search is done by Optuna: pip install "holdfast[cli]"') from error
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    kept: Any = storage
    if "://" not in storage:
        Path(storage).parent.mkdir(parents=True, exist_ok=True)
        kept = JournalStorage(JournalFileBackend(storage))
    try:
        return optuna.create_study(
            storage=kept, study_name=name, directions=["minimize", "minimize"], load_if_exists=True
        )
    except (ImportError, ValueError, OSError):
        raise
    except Exception as error:  # of a database's driver
        raise ValueError(f"the storage {storage} cannot be opened: {error}") from error


def counted(study: Any) -> list[Any]:
    """The trials that trained, train, or failed in earnest; not points of other α, not the dead."""
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if "of" not in trial.user_attrs
        and (trial.state.name in ("COMPLETE", "PRUNED", "RUNNING") or "error" in trial.user_attrs)
    ]


def place_of(folder: Path) -> str:
    """Who works where: a machine and its folder."""
    return f"{socket.gethostname()}:{folder.resolve()}"


def revive(study: Any, folder: Path) -> None:
    """Put what was stopped in this folder, where nobody works now, first in the queue again."""
    from optuna.trial import TrialState

    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        if trial.user_attrs.get("place") == place_of(folder):
            study.tell(trial.number, state=TrialState.FAIL)
            study.enqueue_trial(trial.params)


def hopeless(study: Any, update: int, goals: Sequence[float]) -> bool:
    """Whether at least half of the finished trials, four or more, were better in both goals then.

    Optuna's pruners know one goal; this is its median rule for two.
    """
    then = [
        trial.user_attrs["looks"][str(update)]
        for trial in counted(study)
        if trial.state.name == "COMPLETE" and str(update) in trial.user_attrs.get("looks", {})
    ]
    better = [all(a < b for a, b in zip(look, goals, strict=True)) for look in then]
    return len(then) >= 4 and 2 * sum(better) >= len(then)
