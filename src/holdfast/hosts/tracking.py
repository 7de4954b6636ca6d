"""Experiment tracking: the log of a run, in TensorBoard, Weights & Biases and MLflow.

    tracking = Tracking("tensorboard")
    with tracking.run("runs/tracking", "recadam", settings={"lr": 1e-4}) as log:
        model = finetune_loop(model, "recadam", data, lr=1e-4, log=log)

Trackers change nothing else: neither random numbers nor results depend on them. One that fails
during the training is reported once, and the training goes on without it.
"""

import contextlib
import json
import logging
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from holdfast._torch.checks import NamedSettings, one_of
from holdfast._torch.rng import preserve_rng
from holdfast.io.files import first_line, write_text

if TYPE_CHECKING:
    from holdfast.hosts._trackers import Tracker

logger = logging.getLogger(__name__)

TrackerName = Literal["tensorboard", "wandb", "mlflow"]


@dataclass(frozen=True)
class Tracking(NamedSettings):
    """Trackers that get the log of each run. They need ``pip install "holdfast[tracking]"``.

    Attributes:
        report_to: trackers that get the log of each training run: ``tensorboard``, ``wandb``,
            ``mlflow``. Their files are in ``tracking`` in the output directory, unless the
            environment says otherwise (WANDB_DIR, MLFLOW_TRACKING_URI).
        project: the project of W&B and the experiment of MLflow that the runs belong to; by default
            that of the environment (WANDB_PROJECT, MLFLOW_EXPERIMENT_NAME), or ``holdfast``.

    Example:
        >>> Tracking(("tensorboard", "tensorbord"))
        Traceback (most recent call last):
        ValueError: report_to must be one of 'tensorboard', 'wandb', 'mlflow', got 'tensorbord'
    """

    report_to: tuple[TrackerName, ...] = ()
    project: str | None = None

    def __post_init__(self) -> None:
        given: Any = self.report_to
        names = [given] if isinstance(given, str) else given
        for name in names:
            one_of("report_to", name, get_args(TrackerName))
        object.__setattr__(self, "report_to", tuple(dict.fromkeys(names)))
        if self.project is not None and not re.fullmatch(r"[^/\\#?%:'\"]{1,128}", self.project):
            raise ValueError(
                "project must be a name of at most 128 characters without / \\ # ? % : and "
                f"quotation marks, got {self.project!r}"
            )

    def check(self) -> None:
        """Raise ImportError if a package is missing, and ValueError if W&B is not logged in."""
        for cls in self._classes().values():
            with _undisturbed():
                cls.check()

    def prepare(self, folder: Path) -> None:
        """Check the trackers, and create what all runs in a folder share, before any work starts.

        Raise ValueError if a tracker does not answer.
        """
        self.check()
        for cls in self._classes().values():
            with _undisturbed():
                cls.prepare(folder, self.project)

    def run(
        self,
        folder: str | os.PathLike[str],
        name: str,
        *,
        key: str = "",
        group: str | None = None,
        settings: Mapping[str, Any] | None = None,
        resume: bool = False,
    ) -> "TrackedRun":
        """One run in all trackers: a context manager, and a function for ``log=`` of a host.

        Args:
            folder: where files of the trackers go.
            name: name of the run. TensorBoard numbers a run whose name a finished one has.
            key: what distinguishes it from other runs of the same name in this folder.
            group: name that a group of runs shares.
            settings: hyperparameters, which may be nested.
            resume: continue the run that was stopped before its end. Updates that a tracker has
                already are not logged again.
        """
        entry = Entry(Path(folder), self.project, group, name, key)
        return TrackedRun(self, entry, flat(settings or {}), is_resumed=resume)

    def _classes(self) -> dict[str, "type[Tracker]"]:
        if not self.report_to:
            return {}
        from holdfast.hosts._trackers import TRACKERS

        return {name: TRACKERS[name] for name in self.report_to}


@dataclass(frozen=True)
class Entry:
    """How trackers name a run, and the folder of their files.

    ``group`` joins the runs of one comparison. ``key`` distinguishes runs of the same name. The
    name must not be empty or only dots: this raises ValueError.
    """

    folder: Path
    project: str | None
    group: str | None
    name: str
    key: str

    def __post_init__(self) -> None:
        _file_name(self.name)

    @property
    def file_name(self) -> str:
        return _file_name(f"{self.name}, {self.key}" if self.key else self.name)


class State(NamedTuple):
    """How far a run is in a tracker, which gave it an id."""

    id: str
    update: int


@dataclass
class TrackedRun:
    """One run in all trackers. It starts with its first row."""

    tracking: Tracking
    entry: Entry
    settings: dict[str, Any]
    is_resumed: bool

    def __post_init__(self) -> None:
        self._trackers: dict[str, Tracker] | None = None  # None before the start
        self._states: dict[str, State] = {}
        self._last = 0
        self.seconds = 0.0  # that the trackers took

    def __enter__(self) -> "TrackedRun":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in list((self._trackers or {}).items()):
            with self._reporting(name):
                tracker.end(failed=kind is not None)
        if kind is None and self._trackers:
            with contextlib.suppress(OSError):
                self._file.unlink()  # only a stopped run needs it

    def follow(self, settings: Mapping[str, Any], history: Iterable[Mapping[str, float]]) -> None:
        """Add settings, and continue after the rows that an earlier process has logged."""
        self.settings |= flat(settings)
        rows = list(history)
        self.is_resumed = bool(rows)
        for row in rows:
            self(row)

    def __call__(self, row: Mapping[str, float]) -> None:
        """Log a row of figures with the number of its ``update``."""
        self._last = update = int(row["update"])
        values = {name: value for name, value in row.items() if name != "update"}
        for name, tracker in self._running():
            if values and update > self._states[name].update:
                with self._reporting(name):
                    tracker.log(values, update)
                    self._states[name] = State(tracker.id, update)
        if self._trackers:
            with self._reporting("the file of the trackers"):
                write_text(self._file, json.dumps(self._states))

    def conclude(self, figures: Mapping[str, float]) -> None:
        """Log figures of the whole run at its last update, under names with ``final/``."""
        values = {f"final/{name}": float(value) for name, value in figures.items()}
        for name, tracker in self._running():
            with self._reporting(name):
                tracker.log(values, self._last)

    def _running(self) -> "list[tuple[str, Tracker]]":
        if self._trackers is None:
            self._start()
        return list((self._trackers or {}).items())

    def _start(self) -> None:
        self._trackers = {}
        stopped = self._read()
        known = stopped if self.is_resumed else {}
        for name in self.tracking.report_to:
            with self._reporting(name):
                self.entry.folder.mkdir(parents=True, exist_ok=True)
                cls = self.tracking._classes()[name]  # a node of Ray may lack the package
                if name in stopped and name not in known:
                    cls.discard(self.entry, stopped[name])
                tracker = cls(self.entry, known.get(name))
                tracker.start()
                if name not in known:
                    tracker.store_init_configuration(self.settings)
                self._trackers[name] = tracker
                self._states[name] = known.get(name) or State(tracker.id, -1)

    @property
    def _file(self) -> Path:
        return self.entry.folder / f"{self.entry.file_name}.json"

    def _read(self) -> dict[str, State]:
        """The states of a stopped run; none if they are damaged, and the trackers start anew."""
        with contextlib.suppress(OSError, ValueError, AttributeError, TypeError):
            read = json.loads(self._file.read_text(encoding="utf-8"))
            return {name: State(_file_name(id_), int(last)) for name, (id_, last) in read.items()}
        return {}

    @contextlib.contextmanager
    def _reporting(self, name: str) -> Iterator[None]:
        """A tracker that fails must not end the training: say so once, and go on without it."""
        begin = time.monotonic()
        try:
            with _undisturbed():
                yield
        except Exception as error:  # of many kinds
            if self._trackers is not None:
                self._trackers.pop(name, None)
            logger.warning(
                f"{name} failed, and the run goes on without it: {type(error).__name__}: "
                f"{first_line(error)}"
            )
        finally:
            self.seconds += time.monotonic() - begin


def _file_name(name: str) -> str:
    """A name as the name of a file, which is never a directory above."""
    if not name.strip(". "):
        raise ValueError(f"the name of a run must have more than dots and spaces, got {name!r}")
    return re.sub(r"[^\w.,=+ -]", "_", name)


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted name, as plain values.

    >>> flat({"lr": 1e-4, "merging": {"name": "wise-ft"}, "seeds": [0, 1], "new": None})
    {'lr': 0.0001, 'merging.name': 'wise-ft', 'seeds': '0, 1', 'new': 'none'}
    """
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
            value = {str(number): item for number, item in enumerate(value)}
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list | tuple):
            found[f"{prefix}{name}"] = ", ".join(map(str, value))
        elif isinstance(value, bool | int | float | str):
            found[f"{prefix}{name}"] = value
        else:
            found[f"{prefix}{name}"] = "none" if value is None else str(value)
    return found


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Run code of a tracker: random numbers stay as they are, and its deprecations are its own."""
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")  # read when it is imported
    with preserve_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        yield
