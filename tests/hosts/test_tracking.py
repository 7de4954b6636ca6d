"""The log of a run in real trackers, on local files: each row is there once."""

import json
import logging
import os
import random

import pytest
import torch

pytest.importorskip("accelerate", reason="the hf extra is not installed")

from accelerate import PartialState

from holdfast import LoopSettings, Tracking, Watch, finetune_loop
from tracked import figures_of, in_mlflow, in_tensorboard, in_wandb

SETTINGS = {"recipe": "recadam", "lr": 0.01, "merging": {"name": "keep"}, "seed": None}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    PartialState._reset_state()  # in a loop of one's own, nothing has made it


def train(log, updates=6, **more):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 2))
    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.arange(32) % 2)
    return finetune_loop(
        model, "recadam+l2-sp", data, lr=1e-2, task="classification", batch_size=8, log=log,
        settings=LoopSettings(max_updates=updates, log_every=1), watch=Watch(model, every=2),
        progress=False, **more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def plain():
    """A run without trackers: its weights and its log."""
    history = []
    return train(history.append), history


def weights(model):
    return [p.detach() for p in model.parameters()]


def close(found):
    """As float32, in which TensorBoard stores figures."""
    return {
        name: [(step, pytest.approx(value, rel=1e-6)) for step, value in row]
        for name, row in found.items()
    }


class Stopped(Exception):
    pass


def stopped_run(tracking, folder, name, rows):
    def run():
        with tracking.run(folder, name, settings=SETTINGS) as log:
            for row in rows:
                log(row)
            raise Stopped

    with pytest.raises(Stopped):
        run()


def losses(updates):
    return [{"update": update, "loss": 1.0 / update} for update in updates]


def test_tensorboard(tmp_path, plain):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    with Tracking("tensorboard").run(tmp_path, "mine", settings=SETTINGS) as log:
        model = train(log)
        log.conclude({"score": 0.5})
    figures, settings = in_tensorboard(tmp_path / "tensorboard" / "mine")
    assert figures.pop("final/score") == [(6, 0.5)]
    assert figures == close(figures_of(plain[1]))
    assert {"loss", "lr", "lam", "pull", "penalty/L2SP", "forgetting/distance"} <= {*figures}
    assert settings == {
        "recipe": "recadam", "lr": 0.01, "merging.name": "keep", "seed": "none",
    }  # fmt: skip
    assert all(map(torch.equal, weights(model), weights(plain[0])))  # with dropout
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]


def test_wandb(tmp_path, plain):
    pytest.importorskip("wandb", reason="the tracking extra is not installed")
    tracking = Tracking("wandb", project="papers")
    tracking.prepare(tmp_path)
    with tracking.run(tmp_path, "mine", group="plan", settings=SETTINGS) as log:
        model = train(log)
    figures, settings, about = in_wandb(tmp_path)
    assert figures == figures_of(plain[1])
    assert settings["merging.name"] == "keep"
    assert about == ("mine", "plan", "papers")
    assert all(map(torch.equal, weights(model), weights(plain[0])))


def test_mlflow(tmp_path, plain, caplog):  # long: MLflow takes seconds to create its database
    mlflow = pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    tracking = Tracking(("mlflow",))
    tracking.prepare(tmp_path)
    before = random.getstate()
    with tracking.run(tmp_path, "mine", group="plan", settings=SETTINGS) as log:
        model = train(log)
    assert random.getstate() == before
    assert not mlflow.is_tracking_uri_set()  # a later run has a file of its own
    stopped_run(tracking, tmp_path, "other", [{"update": 1, "odd, (name)//x": 2.0}])
    stopped_run(tracking, tmp_path, "stopped", [{"update": 1, "loss": 2.0}])
    with tracking.run(tmp_path, "stopped", resume=True) as log:
        log({"update": 1, "loss": 2.0})
        log({"update": 2, "loss": 1.0})
    runs = in_mlflow(tmp_path / "mlflow.db")
    figures, settings, tags, status = runs["mine"]
    assert figures == figures_of(plain[1])
    assert settings["merging.name"] == "keep"
    assert (tags["group"], status) == ("plan", "FINISHED")
    assert runs["other"][0] == {"odd_ _name_/x": [(1, 2.0)]}
    assert runs["other"][3] == "FAILED"
    assert runs["stopped"][0] == {"loss": [(1, 2.0), (2, 1.0)]}
    assert runs["stopped"][3] == "FINISHED"
    assert all(map(torch.equal, weights(model), weights(plain[0])))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_resumed_run_continues_without_a_step_twice(tmp_path):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    tracking, wanted = Tracking("tensorboard"), [1, 2, 3, 4, 5, 6]
    stopped_run(tracking, tmp_path, "mine", losses(wanted[:4]))
    # It was killed after update 4, before that was noted.
    (tmp_path / "mine.json").write_text('{"tensorboard": ["mine", 3]}')
    with tracking.run(tmp_path, "mine", resume=True) as log:
        for row in losses(wanted[2:]):  # its checkpoint is older than its log
            log(row)
    figures, settings = in_tensorboard(tmp_path / "tensorboard" / "mine")
    assert [step for step, _ in figures["loss"]] == wanted
    assert settings["lr"] == 0.01


def test_a_run_that_starts_again_replaces_the_stopped_one(tmp_path):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    tracking = Tracking("tensorboard")
    stopped_run(tracking, tmp_path, "mine", losses([1, 2, 3]))
    with tracking.run(tmp_path, "mine") as log:
        log({"update": 1, "loss": 9.0})
    (tmp_path / "other.json").write_text('["damaged"]')
    with tracking.run(tmp_path, "other", resume=True) as log:
        log({"update": 1, "loss": 8.0})
    found = [in_tensorboard(tmp_path / "tensorboard" / name)[0] for name in ("mine", "other")]
    assert found == [{"loss": [(1, 9.0)]}, {"loss": [(1, 8.0)]}]


def test_a_finished_run_stays_if_another_has_its_name(tmp_path):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    for loss in (3.0, 2.0):
        with Tracking("tensorboard").run(tmp_path, "mine") as log:
            log({"update": 1, "loss": loss})
    stopped_run(Tracking("tensorboard"), tmp_path, "mine", losses([1, 2]))
    with Tracking("tensorboard").run(tmp_path, "mine", resume=True) as log:
        log({"update": 3, "loss": 1 / 3})
    found = {at.name: in_tensorboard(at)[0] for at in (tmp_path / "tensorboard").iterdir()}
    assert found == {
        "mine": {"loss": [(1, 3.0)]}, "mine-2": {"loss": [(1, 2.0)]},
        "mine-3": close(figures_of(losses([1, 2, 3]))),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["", ".", "..", " .. "])
def test_a_name_that_is_no_file_name(tmp_path, name):
    with pytest.raises(ValueError, match="name of a run must have more than dots and spaces"):
        Tracking("tensorboard").run(tmp_path, name)


@pytest.mark.parametrize("left", ["..", ".", "", "../.."])
def test_a_damaged_state_removes_nothing_outside_the_run(tmp_path, left):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    kept = tmp_path / "runs" / "precious.txt"
    kept.parent.mkdir()
    kept.write_text("mine")
    (kept.parent / "mine.json").write_text(json.dumps({"tensorboard": [left, 3]}))
    with Tracking("tensorboard").run(kept.parent, "mine") as log:
        log({"update": 1, "loss": 1.0})
    assert kept.read_text() == "mine"


def test_a_tracker_that_fails_does_not_end_the_training(tmp_path, plain, monkeypatch, caplog):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    from holdfast.hosts._trackers import TensorBoard

    def fails(self, values, step):
        if step >= 3:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(TensorBoard, "log", fails)
    with Tracking("tensorboard").run(tmp_path, "mine") as log:
        model = train(log)
    assert all(map(torch.equal, weights(model), weights(plain[0])))
    assert [record.getMessage() for record in caplog.records] == [
        "tensorboard failed, and the run goes on without it: OSError: [Errno 28] No space left on "
        "device"
    ]


def test_what_is_refused_before_any_work(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="must be one of 'tensorboard', 'wandb', 'mlflow'"):
        Tracking("comet")
    with pytest.raises(ValueError, match="project must be a name"):
        Tracking("wandb", project="a/b")
    with pytest.raises(TypeError, match="no setting 'report'; did you mean 'report_to'"):
        Tracking(report="wandb")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "mlflow", None)
        with pytest.raises(ImportError, match=r'mlflow: pip install "holdfast\[tracking\]"'):
            Tracking("mlflow").check()


def test_wandb_without_a_login(monkeypatch, tmp_path):
    wandb = pytest.importorskip("wandb", reason="the tracking extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "online")
    for name in ("HOME", "NETRC", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    wandb.teardown()
    with pytest.raises(ValueError, match="wandb is not logged in: run `wandb login`, or set"):
        Tracking("wandb").check()
    wandb.teardown()


def test_an_mlflow_server_that_does_not_answer(monkeypatch, tmp_path):
    pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(ValueError, match=r"mlflow cannot use http://127\.0\.0\.1:9: set MLFLOW_T"):
        Tracking("mlflow").prepare(tmp_path / "tracking")
    assert not (tmp_path / "tracking").exists()


def test_an_mlflow_server_that_stops_answering(monkeypatch, tmp_path, caplog):
    pytest.importorskip("mlflow", reason="the tracking extra is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES")
    with Tracking("mlflow").run(tmp_path, "mine") as log:  # in a process that has not prepared it
        log({"update": 1, "loss": 1.0})
    assert "mlflow failed, and the run goes on without it" in caplog.text
    assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == "2"
