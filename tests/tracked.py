"""Read back what trackers have written: the figures of a run by name, each at its updates."""

import json
import sqlite3
import struct
import warnings
from contextlib import closing
from pathlib import Path


def figures_of(rows):
    """Rows of a log in the form that the other functions return."""
    found = {}
    for row in rows:
        for name, value in row.items():
            if name != "update":
                found.setdefault(name, []).append((row["update"], value))
    return found


def in_tensorboard(folder):
    """The figures, and the settings, in the event files of one run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        from tensorboard.plugins.hparams import metadata

        read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
        read.Reload()
        settings = {}
        if given := read.summary_metadata.get(metadata.SESSION_START_INFO_TAG):
            content = given.plugin_data.content
            settings = metadata.parse_session_start_info_plugin_data(content).hparams
    kinds = ("string_value", "number_value", "bool_value")
    return {
        name: sorted((event.step, event.value) for event in read.Scalars(name))
        for name in read.Tags()["scalars"]
    }, {
        name: next(getattr(value, kind) for kind in kinds if value.HasField(kind))
        for name, value in settings.items()
    }


def in_mlflow(file):
    """Runs by name: figures, settings, tags and status."""
    with closing(sqlite3.connect(file)) as store:
        runs = store.execute("select run_uuid, name, status from runs").fetchall()
        found = {}
        for run, name, status in runs:
            assert name not in found
            ask = "select key, step, value from metrics where run_uuid = ? order by key, step"
            figures = {}
            for key, step, value in store.execute(ask, (run,)):
                figures.setdefault(key, []).append((step, value))
            settings, tags = (
                dict(store.execute(f"select key, value from {table} where run_uuid = ?", (run,)))
                for table in ("params", "tags")
            )
            found[name] = figures, settings, tags, status
    return found


def in_wandb(folder):
    """Figures, settings, name, group and project of the one run in a folder of offline mode."""
    from wandb.proto.wandb_internal_pb2 import Record

    (file,) = Path(folder).glob("wandb/offline-run-*/run-*.wandb")
    figures, settings, about = {}, {}, ()
    for data in _records(file.read_bytes()):
        record = Record.FromString(data)
        if record.WhichOneof("record_type") == "history":
            values = {
                item.key or "/".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            for name, value in values.items():
                if not name.startswith("_"):
                    figures.setdefault(name, []).append((values["_step"], value))
        for one in (record.run.config, record.config):
            settings |= {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in one.update
            }
        if record.WhichOneof("record_type") == "run":
            about = record.run.display_name, record.run.run_group, record.run.project
    return figures, settings, about


def _records(data, block=1 << 15):
    """The records of a LevelDB log, which may span its blocks."""
    at, parts = 7, b""  # after the header of the file
    while at + 7 <= len(data):
        if block - at % block < 7:
            at += block - at % block
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield parts
            parts = b""
