"""The trackers of Accelerate, as holdfast starts, continues and ends a run in them."""

import contextlib
import itertools
import os
import posixpath
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from holdfast._torch.imports import require
from holdfast.hosts.tracking import Entry, State
from holdfast.io.files import first_line

require("accelerate", extra="tracking", what="Experiment tracking")
from accelerate import PartialState  # noqa: E402
from accelerate.tracking import (  # noqa: E402
    MLflowTracker,
    TensorBoardTracker,
    WandBTracker,
)

PROJECT = "holdfast"


class Tracker(Protocol):
    """A tracker of Accelerate. ``known`` is the state of a run to continue."""

    id: str

    def __init__(self, entry: Entry, known: State | None) -> None: ...

    @staticmethod
    def check() -> None:
        """Raise ImportError or ValueError if the tracker cannot be used here."""

    @staticmethod
    def prepare(folder: Path, project: str | None) -> None:
        """Create what all runs share, and raise ValueError if the tracker does not answer."""

    @staticmethod
    def discard(entry: Entry, stopped: State) -> None:
        """Remove a stopped run that starts again, if two of the same name would be mixed up."""

    def start(self) -> None: ...

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, float], step: int) -> None: ...

    def end(self, failed: bool) -> None: ...


class TensorBoard(TensorBoardTracker):  # type: ignore[misc]
    """One folder of event files per run."""

    def __init__(self, entry: Entry, known: State | None) -> None:
        folder = self._folder(entry)
        names = (f"{entry.file_name}-{n}" if n > 1 else entry.file_name for n in itertools.count(1))
        unused = (name for name in names if not (folder / name).exists())
        self.id = next(unused) if known is None else known.id
        # A kill may have come between an update and its note in the state.
        purge = {} if known is None else {"purge_step": known.update + 1}
        super().__init__(self.id, folder, **purge)

    @staticmethod
    def check() -> None:
        _need("tensorboard")

    @staticmethod
    def prepare(folder: Path, project: str | None) -> None:
        """Nothing is shared."""

    @staticmethod
    def discard(entry: Entry, stopped: State) -> None:
        shutil.rmtree(TensorBoard._folder(entry) / stopped.id, ignore_errors=True)

    @staticmethod
    def _folder(entry: Entry) -> Path:
        return entry.folder / "tensorboard"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Write them into the file of the run; Accelerate would add a second run for them."""
        from torch.utils.tensorboard.summary import hparams

        _, settings, _ = hparams(values, {})
        self.writer.file_writer.add_summary(settings)

    def end(self, failed: bool) -> None:
        self.finish()


class Wandb(WandBTracker):  # type: ignore[misc]
    """A run of Weights & Biases, which syncs it or, in offline mode, writes it to a folder."""

    def __init__(self, entry: Entry, known: State | None) -> None:
        wandb = _need("wandb")
        self.id = secrets.token_hex(4) if known is None else known.id
        options: dict[str, Any] = {"group": entry.group}
        if known is not None and not _is_offline(wandb):
            options["resume"] = "allow"
        if "WANDB_DIR" not in os.environ:
            entry.folder.mkdir(parents=True, exist_ok=True)  # else it writes elsewhere
            options["dir"] = str(entry.folder)
        project = entry.project or os.environ.get("WANDB_PROJECT", PROJECT)
        settings = wandb.Settings(console="off", silent=True)  # the terminal is ours
        super().__init__(project, id=self.id, name=entry.name, settings=settings, **options)

    def start(self) -> None:
        PartialState()  # without it, Accelerate refuses to log that the run has started
        super().start()

    @staticmethod
    def check() -> None:
        wandb = _need("wandb")
        if _is_offline(wandb):
            return
        try:
            is_ready = wandb.login(prompt=False)
        except wandb.errors.Error as error:
            raise ValueError(f"wandb cannot log in: {first_line(error)}") from error
        if not is_ready:
            raise ValueError(
                "wandb is not logged in: run `wandb login`, or set WANDB_MODE=offline to write the "
                "runs to a folder"
            )

    @staticmethod
    def prepare(folder: Path, project: str | None) -> None:
        """Nothing is shared."""

    @staticmethod
    def discard(entry: Entry, stopped: State) -> None:
        """Runs have ids of their own."""

    def end(self, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class MLflow(MLflowTracker):  # type: ignore[misc]
    """A run in the MLflow store of the environment, or in a SQLite file."""

    def __init__(self, entry: Entry, known: State | None) -> None:
        tags = None if entry.group is None else {"group": entry.group}
        run_id = None if known is None else known.id
        super().__init__(PROJECT, run_id=run_id, tags=tags, run_name=entry.name)
        if entry.project is not None:
            self.experiment_name = entry.project  # the environment has set another
        self.store = contextlib.ExitStack()
        self.folder = entry.folder

    @property
    def id(self) -> str:
        return str(self.active_run.info.run_id)

    @staticmethod
    def check() -> None:
        for package in ("mlflow", "sqlalchemy", "alembic"):  # the others for SQLite
            _need(package, "mlflow")

    @staticmethod
    def prepare(folder: Path, project: str | None) -> None:
        """Create the store and the experiment, so that processes do not race to create them."""
        mlflow = _need("mlflow")
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        with _store(folder) as is_ours:
            try:
                if mlflow.get_experiment_by_name(name) is None:
                    place = (folder / "mlflow-artifacts").absolute().as_uri() if is_ours else None
                    mlflow.create_experiment(name, artifact_location=place)
            except mlflow.MlflowException as error:
                raise ValueError(
                    f"mlflow cannot use {mlflow.get_tracking_uri()}: set MLFLOW_TRACKING_URI to a "
                    f"server that runs, or leave it out ({first_line(error)[:160]})"
                ) from error

    @staticmethod
    def discard(entry: Entry, stopped: State) -> None:
        """Runs have ids of their own."""

    def start(self) -> None:
        self.store.enter_context(_store(self.folder))
        super().start()

    def log(self, values: dict[str, float], step: int) -> None:
        """Log under names that MLflow accepts."""
        names = {name: re.sub(r"[^\w.\- :/]", "_", posixpath.normpath(name)) for name in values}
        super().log({names[name]: value for name, value in values.items()}, step)

    def end(self, failed: bool) -> None:
        with self.store:
            _need("mlflow").end_run("FAILED" if failed else "FINISHED")


TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def _need(package: str, tracker: str | None = None) -> Any:
    return require(package, extra="tracking", what=f"Tracking with {tracker or package}")


def _is_offline(wandb: Any) -> bool:
    return bool(wandb.setup().settings.mode != "online")


@contextlib.contextmanager
def _store(folder: Path) -> Iterator[bool]:
    """Let MLflow write to a file of the folder; yields False if the user has set another store."""
    mlflow = _need("mlflow")
    # It would retry for minutes, also in the middle of a training, in any process.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
    if mlflow.is_tracking_uri_set():
        yield False
        return
    folder.mkdir(parents=True, exist_ok=True)
    mlflow.set_tracking_uri(f"sqlite:///{(folder / 'mlflow.db').absolute().as_posix()}")
    try:
        yield True
    finally:
        mlflow.set_tracking_uri(None)
