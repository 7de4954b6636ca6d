"""The Optuna study behind ``tune``: where it is kept, which trials count, and what is hopeless.

Everything is in the study, results too: machines that share its storage share the search.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from holdfast.io.files import write_whole

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
        # Absolute, as the lock is a link to it: for the lock of a dead process Optuna waits half a
        # minute, but forever where the link leads nowhere.
        kept = JournalStorage(JournalFileBackend(str(Path(storage).absolute())))
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
    """A name for a folder that no other has, on any machine: it is kept in it."""
    file = folder / ".place"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, lambda path: path.write_text(secrets.token_hex(8)))
    return file.read_text()


def revive(study: Any, place: str, worker: int | None = None) -> None:
    """Put what was stopped in this place, where nobody works now, first in the queue again.

    A trial whose process has died twice has failed. One that was stopped before it could say whose
    it is counts as stopped here after a minute.
    """
    from optuna.trial import TrialState

    now = datetime.now()
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        attrs = trial.user_attrs
        nobodys = "place" not in attrs and now - trial.datetime_start > timedelta(minutes=1)
        mine = attrs.get("place") == place and worker in (None, attrs.get("worker"))
        if not (mine or nobodys):
            continue
        deaths = attrs.get("deaths", 0) + (worker is not None)
        if deaths >= 2:
            study._storage.set_trial_user_attr(
                trial._trial_id, "error", "its process died twice: was there enough memory?"
            )
        study.tell(trial.number, state=TrialState.FAIL)
        if deaths < 2:
            wanted = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            study.enqueue_trial(wanted, user_attrs={"deaths": deaths})


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
