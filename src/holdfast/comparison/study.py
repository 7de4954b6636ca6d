"""The study of a search in its storage: open it, count its trials, put stopped ones back.

A study is a journal file, which machines may share, or a database.
"""

import secrets
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

from holdfast._torch.imports import require
from holdfast.io.files import first_line, naming_errors, remove_cut_line, write_text


def open_study(storage: str, name: str, *, objectives: int = 2) -> Any:
    """Open or create a study at the path of a journal file, or at the URL of a database.

    Two objectives are minimized, one is maximized. A study that exists keeps its own.
    """
    optuna = require("optuna", extra="cli", what="the search")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        kept: Any = storage if "://" in storage else _journal(Path(storage).resolve())
        return optuna.create_study(
            storage=kept, study_name=name, load_if_exists=True,
            directions=["maximize"] if objectives == 1 else ["minimize"] * objectives,
        )  # fmt: skip
    except (ImportError, OSError):
        raise
    except Exception as error:  # a damaged journal makes Optuna raise many types, as databases do
        raise ValueError(
            f"cannot open the study in {storage}, is it damaged? ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from error


def _journal(path: Path) -> Any:
    """The journal of a study in a file.

    The path is absolute because the lock is a symbolic link to it. Optuna breaks the lock of a dead
    process after half a minute, but waits forever if the link is broken.
    """
    from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock, JournalStorage

    class Lock(JournalFileSymlinkLock):
        def release(self) -> None:
            try:
                super().release()
            except RuntimeError:  # it renames the link first, and tries forever if that fails
                path.with_name(f"{path.name}.lock").unlink(missing_ok=True)

    lock = Lock(str(path))

    class Journal(JournalFileBackend):
        def append_logs(self, logs: Any) -> None:
            lock.acquire()
            try:
                remove_cut_line(path)
            finally:
                lock.release()
            with naming_errors(path):
                super().append_logs(logs)

    path.parent.mkdir(parents=True, exist_ok=True)
    return JournalStorage(Journal(str(path), lock))


def unlock(storage: str) -> None:
    """Remove the lock of a journal file that no process uses: a dead one may have left it."""
    path = Path(storage).resolve()
    path.with_name(f"{path.name}.lock").unlink(missing_ok=True)


def counted(study: Any) -> list[Any]:
    """The trials that count: completed, pruned, running, or failed by an error of their own.

    Those that failed have the attribute ``error``. Candidates at other values of the swept setting
    and trials of dead processes do not count.
    """
    return [
        trial
        for trial in study.get_trials(deepcopy=False)
        if "of" not in trial.user_attrs
        and (trial.state.name in ("COMPLETE", "PRUNED", "RUNNING") or "error" in trial.user_attrs)
    ]


def tell_failed(study: Any, trial: Any, error: str) -> None:
    """End a trial by an error of its own.

    For the sampler it is a pruned one, the worst of all. TPE ignores trials in the state FAIL, so a
    recipe that always fails would seem unexplored, and be drawn again and again.
    """
    from optuna.trial import TrialState

    trial.set_user_attr("error", error)
    study.tell(trial, state=TrialState.PRUNED)


def rung_attribute(rung: int) -> str:
    """The attribute of a trial that holds its results at a rung."""
    return f"rung {rung}"


def rungs_reached(trial: Any) -> int:
    """The number of rungs at which a trial was tested."""
    return sum(name.startswith("rung ") for name in trial.user_attrs)


def place_of(folder: Path) -> str:
    """A name of a folder that is unique on all machines; it is stored in the folder."""
    file = folder / ".place"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, secrets.token_hex(8))
    return file.read_text()


def revive(
    study: Any,
    place: str,
    worker: int | None = None,
    *,
    alone: bool = False,
    jobs: int = 1,
    died: bool = True,
) -> None:
    """Let the trials that were stopped in a place go on.

    A trial that has reached a rung stays as it is, and one of the ``jobs`` processes adopts it. Any
    other is put back in the queue. ``worker`` is the number of the process that stopped; None if no
    process runs in this place. A trial whose process has ``died`` twice has failed. A trial that
    was stopped before it could record its place is put back after a minute, or at once if no other
    process uses the study (``alone``).
    """
    from optuna.trial import Trial, TrialState

    now, adopted = datetime.now(), 0
    for trial in study.get_trials(deepcopy=False, states=[TrialState.RUNNING]):
        attrs, keep = trial.user_attrs, partial(study._storage.set_trial_user_attr, trial._trial_id)
        old = now - trial.datetime_start > timedelta(minutes=1)
        unclaimed = "place" not in attrs and (alone or old)
        ours = attrs.get("place") == place and worker in (None, attrs.get("worker"))
        if not (ours or unclaimed):
            continue
        dead = died and worker is not None and not attrs.get("paused")
        deaths = attrs.get("deaths", 0) + dead
        if deaths >= 2:
            error = "the worker process died twice, possibly out of memory"
            tell_failed(study, Trial(study, trial._trial_id), error)
        elif rungs_reached(trial):
            keep("deaths", deaths)
            if worker is None:
                keep("worker", adopted % jobs)
                adopted += 1
        else:
            study.tell(trial.number, state=TrialState.FAIL)
            wanted = {**trial.system_attrs.get("fixed_params", {}), **trial.params}
            look = {"first_look": True} if "first_look" in attrs else {}
            study.enqueue_trial(wanted, user_attrs={**look, "deaths": deaths})
