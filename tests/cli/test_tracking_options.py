"""``--report-to`` in ``finetune``, ``compare`` and ``tune``, on local files."""

import argparse
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("tensorboard", reason="the tracking extra is not installed")

from comparison.tiny import save_llama
from holdfast import Measuring, Plan, Results, Training
from holdfast.cli import finetune, main
from holdfast.comparison.rates import with_rates
from tracked import figures_of, in_tensorboard

ROWS = [{"prompt": "two plus two is", "completion": "four"}] * 8
TEXT = "the cat sat on the mat . a dog ran and two plus three is five . " * 9
CHOICES = {"question": "the cat sat on the", "choices": ["mat", "five"], "label": 0}


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    write("train.jsonl", ROWS), write("choices.jsonl", [CHOICES])
    Path("wiki.txt").write_text(TEXT)


def write(name, rows):
    Path(name).write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


def tune_one(model, out, *more, updates=8):
    return main(
        ["finetune", f"--model={model}", "--data=train.jsonl", f"--out={out}", "--batch-size=2",
         "--recipe=recadam", "--lr=1e-2", f"--max-updates={updates}", "--evaluate-every=2",
         "--text", "wiki.txt", "--retained", "choices.jsonl", "--context-free=2",
         "--save-seconds=0", *more]
    )  # fmt: skip


def rows_of(out):
    return json.loads(Path(out, "training.json").read_text())


def close(found):
    return {
        name: [(step, pytest.approx(value, rel=1e-6)) for step, value in row]
        for name, row in found.items()
    }


def same_weights(one, other):
    one, other = (load_file(Path(folder, "model.safetensors")) for folder in (one, other))
    return all(torch.equal(one[name], other[name]) for name in one)


def test_finetune_with_retained_scores_during_the_training(llama, capsys):
    assert tune_one(llama, "out", "--report-to", "tensorboard", "--project=papers") == 0
    rows = rows_of("out")
    retained = {
        "forgetting/wiki/perplexity", "forgetting/choices/accuracy", "forgetting/kl/context-free",
    }  # fmt: skip
    for name in retained:
        assert [row["update"] for row in rows if name in row] == [0, 2, 4, 6, 8]
    assert rows[-1]["forgetting/wiki/perplexity"] != rows[0]["forgetting/wiki/perplexity"]
    figures, settings = in_tensorboard("out/tracking/tensorboard/out")
    assert figures == close(figures_of(rows))
    assert retained | {"loss", "lr", "lam", "pull", "forgetting/distance"} == {*figures}
    assert settings["recipe"] == "recadam"
    assert settings["update.lr"] == 1e-2
    assert settings["max_updates"] == 8
    assert {p.name for p in Path("out/tracking").iterdir()} == {"tensorboard"}
    assert "report_to:\n- tensorboard\n" in Path("out/config.yaml").read_text()
    # The tests at update 0 are those of measure, within the same limits.
    given = ["--text", "wiki.txt", "--limit=100", "--test-max-length=512", "--context-free=0"]
    capsys.readouterr()
    assert main(["measure", llama, "out", *given, "--no-drift", "--json"]) == 0
    (score,) = json.loads(capsys.readouterr().out)["scores"]
    assert score["before"]["value"] == pytest.approx(rows[0]["forgetting/wiki/perplexity"])
    assert score["after"]["value"] == pytest.approx(rows[-1]["forgetting/wiki/perplexity"])
    # Nothing else depends on the trackers.
    assert tune_one(llama, "plain") == 0
    assert rows_of("plain") == rows
    assert same_weights("plain", "out")


def stop_at(monkeypatch, update):
    """Let the next training fail at an update."""
    make = finetune.watch_training

    def failing(*args, **options):
        watch = make(*args, **options)

        def look(number, model):
            if number == update:
                raise OSError("the power failed")
            return watch(number, model)

        return look

    monkeypatch.setattr(finetune, "watch_training", failing)


def test_a_stopped_finetune_continues_in_its_trackers(llama, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert tune_one(llama, "out", "--report-to", "tensorboard") == 2
    assert Path("out/run.pt").exists()
    # A tracker may be added or left out; other settings are refused as before.
    assert tune_one(llama, "out", "--report-to", "tensorboard", "--project=papers") == 0
    figures, _ = in_tensorboard("out/tracking/tensorboard/out")
    assert figures == close(figures_of(rows_of("out")))
    assert len(list(Path("out/tracking/tensorboard/out").iterdir())) == 2  # one per process
    assert [p.name for p in Path("out/tracking").iterdir()] == ["tensorboard"]


def test_a_tracker_that_is_added_later_gets_the_whole_log(llama, monkeypatch):
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert tune_one(llama, "out") == 2
    assert tune_one(llama, "out", "--report-to", "tensorboard") == 0
    figures, _ = in_tensorboard("out/tracking/tensorboard/out")
    assert figures == close(figures_of(rows_of("out")))


def test_a_run_has_the_name_of_its_directory(tmp_path, monkeypatch):
    (tmp_path / "mine" / "below").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "mine" / "below")
    given = argparse.Namespace(report_to=["tensorboard"], project=None, recipe="recadam")
    assert finetune.track(Path(".."), given).entry.name == "mine"


def test_wrong_options(llama, monkeypatch, capsys):
    for given, words in (
        (["--report-to", "tensorbord"], "--report-to must be 'tensorboard', 'wandb' or 'mlflow'"),
        (["--report-to", "tensorboard", "--project", "a/b"], "project must be a name of at most"),
        (["--retained", "gone.jsonl"], "no such file: gone.jsonl"),
        (["--log-with", "wandb"], "unknown option --log-with; did you mean '--report-to'?"),
    ):
        assert tune_one(llama, "new", *given) == 2
        assert words in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.setitem(__import__("sys").modules, "tensorboard", None)
    assert tune_one(llama, "new", "--report-to", "tensorboard") == 1
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "holdfast: Tracking with tensorboard needs the package tensorboard: pip install "
        '"holdfast[tracking]"'
    ]
    assert not Path("new").exists()


def plan(model, *more):
    """Options of compare and tune; a plan of the same settings has the same ids."""
    write("dev.jsonl", ROWS[:4])
    return [
        f"--model={model}", "--data=train.jsonl", "--target=dev.jsonl", "--text", "wiki.txt",
        "--context-free=2", "--test-max-length=128", "--max-updates=3", "--batch-size=2", *more,
    ]  # fmt: skip


@pytest.mark.usefixtures("forked_workers")
def test_compare(llama):
    grid = ["--recipes", "recadam", "--seeds", "0", "--grid", "lr", "1e-3", "2e-3"]
    given = plan(llama, *grid, "--jobs=2", "--out=runs/mine")
    assert main(["compare", *given, "--report-to", "tensorboard"]) == 0
    results = Results.load("runs/mine/results.json")
    same = Plan(
        llama, "train.jsonl", "dev.jsonl", Measuring(("wiki.txt",), context_free=2, max_length=128),
        ("recadam",), (0,), {"lr": (1e-3, 2e-3)}, training=Training(max_updates=3, batch_size=2),
    )  # fmt: skip
    assert {run.id for run in results.runs} == {spec.id for spec in with_rates(same).runs}
    folders = {p.name: p for p in Path("runs/mine/tracking/tensorboard").iterdir()}
    assert len(folders) == 2
    for run in results.runs:
        digest = run.id.rpartition("-")[2]
        figures, settings = in_tensorboard(folders[f"{run.label}, seed 0, {digest}"])
        (text,) = run.retained
        for name, value in {
            f"target/dev/{run.target.metric}": run.target.after,
            "retained/wiki/perplexity": text.after,
            "retained_loss": run.loss,
            "distance": run.drift.distance,
            "kl/context-free": run.kl["context-free"],
        }.items():
            assert figures[f"final/{name}"] == [(3, pytest.approx(value, rel=1e-6))]
        (loss,) = (curve for curve in run.curves if curve.name == "loss")
        assert [step for step, _ in figures["loss"]] == list(loss.steps)
        assert [value for _, value in figures["loss"]] == pytest.approx(loss.values, rel=1e-6)
        assert (settings["recipe"], settings["seed"]) == (run.recipe, 0)
        assert settings["update.lr"] == run.values["lr"]
    # Finished runs are read, with other trackers too.
    before = sorted(Path("runs/mine/tracking").rglob("*"))
    assert main(["compare", *given]) == 0
    assert sorted(Path("runs/mine/tracking").rglob("*")) == before


@pytest.mark.usefixtures("forked_workers")
def test_tune(llama):
    given = plan(llama, "--recipe=wise-ft", "--trials=1", "--alphas", "1.0", "--jobs=1")
    assert main(["tune", *given, "--out=found", "--report-to", "tensorboard"]) == 0
    found = json.loads(Path("found/tune.json").read_text())
    (folder,) = Path("found/tracking/tensorboard").iterdir()
    assert folder.name.startswith("trial 1, ")
    figures, settings = in_tensorboard(folder)
    target = found["default"]["chosen"]["target"]
    wanted = pytest.approx(target["after"], rel=1e-6)
    assert figures[f"final/target/dev/{target['metric']}"] == [(3, wanted)]
    assert settings["merging.alpha"] == found["default"]["values"]["merging.alpha"]
