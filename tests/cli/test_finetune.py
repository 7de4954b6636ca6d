"""``holdfast finetune`` on the small model that comes with the package, and on other kinds."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_images, save_llama, save_vit  # noqa: E402
from holdfast.builtin import MODEL  # noqa: E402
from holdfast.cli import finetune as command_line  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.hosts.job import train  # noqa: E402
from holdfast.recipe import Recipe, recipe_beside  # noqa: E402

ROWS = [{"prompt": "two plus two is", "completion": "four"}] * 8
SMALL = ["--max-updates=3", "--batch-size=2", "--lr=1e-3", "--recipe=standard"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def finetune(*more, out="out"):
    given = [f"--model={MODEL}", "--data=train.jsonl", f"--out={out}", *SMALL]
    return main(["finetune", *given, *more])


def weights(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_recipe_and_its_config_again(tmp_path, capsys):
    assert finetune("--recipe=recadam+flow") == 0
    said = capsys.readouterr()
    assert re.search(
        r"^3 updates of 2 samples, about \S+ s and what the recipe adds$", said.err, re.MULTILINE
    )
    assert "recadam+flow: weighted loss " in said.out
    assert "The model is in out" in said.out
    *_, asked, measure = said.out.splitlines()
    assert measure == f"holdfast measure {MODEL} out --skills"
    assert "--target FILE" in asked
    left = {"chat_template.jinja", "generation_config.json", "tokenizer_config.json"}
    assert {p.name for p in Path("out").iterdir()} - left == {
        "config.json", "config.yaml", "holdfast_recipe.yaml", "model.safetensors", "tokenizer.json",
        "training.json",
    }  # fmt: skip
    assert json.loads(Path("out/training.json").read_text())[-1]["update"] == 3
    base, tuned = weights(MODEL), weights("out")
    assert any(not torch.equal(base[name].float(), tuned[name]) for name in base)
    assert main(["finetune", "--config=out/config.yaml", "--out=again"]) == 0
    again = weights("again")
    assert all(torch.equal(tuned[name], again[name]) for name in tuned)


def test_without_a_recipe_it_is_holdfast(capsys):
    given = [f"--model={save_llama('llama')}", "--data=train.jsonl", "--out=out"]
    capsys.readouterr()
    assert main(["finetune", *given, "--max-updates=3", "--batch-size=2", "--json"]) == 0
    told = capsys.readouterr()
    found = json.loads(told.out)
    history = [row for row in json.loads(Path("out/training.json").read_text()) if "loss" in row]
    for name in ("loss", "recall"):
        assert found[name] == {"first": history[0][name], "last": history[-1][name]}
    assert found["recipe"] == "holdfast"
    assert found["resolved"]["recall"]["name"] == "self-replay"
    assert found["resolved"]["update"]["lr"] == 4.5e-4  # of the model, not 2e-5
    assert "note: learning rate 0.00045, the default\n" in told.err
    assert "note: the recipe was resolved to SelfReplay(strength=1.0" in told.err
    assert "holdfast: 8 samples\n" in told.err
    assert "everything may change" not in told.err  # the recipe before it is resolved
    (stored,) = Path("cache/pools").iterdir()
    assert f"texts of the pretrained model are stored in {stored.absolute()}" in told.err
    # The config keeps `auto`; the recipe beside the model is the one that was trained.
    assert "recipe: holdfast\n" in Path("out/config.yaml").read_text()
    assert recipe_beside("out") == Recipe.from_dict(found["resolved"])
    # A report says that KL on such texts was a training signal.
    assert main(["measure", "llama", "out", "--context-free=2", "--no-drift"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "own texts was a training signal: it is no evidence of retention." in said
    Path("out/holdfast_recipe.yaml").unlink()  # as after a loop in Python
    for given, told in (([], False), (["--recipe=holdfast"], True)):
        assert main(["measure", "llama", "out", "--context-free=2", "--no-drift", *given]) == 0
        assert (
            "own texts was a training signal" in " ".join(capsys.readouterr().out.split())
        ) == told


@pytest.mark.parametrize(
    ("more", "tests"),
    [
        (["--validation=dev.jsonl"], "--target dev.jsonl --skills"),
        (["--validation=0.5", "--text", "my text.txt"], "--text 'my text.txt'"),
        (["--model=bert", "--data=labeled.jsonl"], "--target FILE"),
        (["--trust-remote-code"], "--skills --trust-remote-code"),
    ],
)
def test_it_names_the_command_that_measures_the_model(more, tests, capsys):
    save_bert("bert")
    Path("my text.txt").write_text("The cat sat on the mat. " * 20)
    Path("dev.jsonl").write_text(json.dumps({"prompt": "one plus one is", "completion": "two"}))
    labeled = [{"text": "a cat", "label": "x"}, {"text": "a dog", "label": "y"}] * 4
    Path("labeled.jsonl").write_text("\n".join(map(json.dumps, labeled)))
    assert finetune(*more) == 0
    model = "bert" if "--model=bert" in more else MODEL
    assert capsys.readouterr().out.splitlines()[-1] == f"holdfast measure {model} out {tests}"


def test_a_log_of_an_earlier_version_has_no_recall_at_first(monkeypatch, capsys):
    begun = [{"update": 0, "loss": 2.0}, {"update": 1, "loss": 1.5, "recall": 0.5}]

    def resumed(*given, **more):
        model, recipe, history = train(*given, **more)
        return model, recipe, [*begun, *history]

    monkeypatch.setattr(command_line, "train", resumed)
    assert finetune("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recall"] == {"first": 0.5, "last": 0.5}
    assert found["loss"]["first"] == 2.0


def test_a_low_target_after_one_epoch_is_trained_for_longer(capsys):
    save_bert("bert")
    rows = [{"text": text, "label": text[-1]} for text in ("a x", "b y") for _ in range(4)]
    Path("labeled.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ["--model=bert", "--data=labeled.jsonl", "--lr=1e-6", "--recipe=standard"]
    assert main(["finetune", *given, "--epochs=1", "--out=out"]) == 0
    capsys.readouterr()
    assert main(["measure", "bert", "out", "--target=labeled.jsonl"]) == 0
    longer = "holdfast finetune --config out/config.yaml --epochs 3 --out out-3-epochs"
    assert capsys.readouterr().out.splitlines()[-1] == f"Next: {longer}"
    assert main(shlex.split(longer)[1:]) == 0


def test_a_recipe_without_a_learning_rate_of_its_own(capsys):
    given = [f"--model={MODEL}", "--data=train.jsonl", "--out=out", "--max-updates=1"]
    assert main(["finetune", *given, "--recipe=standard"]) == 0
    assert "note: learning rate 0.00045, the default\n" in capsys.readouterr().err
    assert recipe_beside("out").update.lr == 4.5e-4
    assert (
        main(
            ["finetune", *given[:2], "--out=again", *given[3:], "--recipe=out/holdfast_recipe.yaml"]
        )
        == 0
    )
    one, other = weights("out"), weights("again")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_settings_of_the_recipe(capsys):
    given = ["--set", "update.eight_bit", "true", "--set", "merging.alpha", "0.5"]
    assert finetune("--recipe=recadam+wise-ft", *given) == 0
    trained = recipe_beside("out")
    assert trained.update.eight_bit
    assert trained.merging.alpha == 0.5
    assert "set:\n  update.eight_bit: true\n  merging.alpha: 0.5\n" in read("out/config.yaml")
    assert main(["finetune", "--config=out/config.yaml", "--out=again"]) == 0
    assert recipe_beside("again") == trained
    capsys.readouterr()
    assert finetune("--recipe=self-replay", "--set", "recall.strenght", "2", out="new") == 2
    said = capsys.readouterr().err
    assert "self-replay has no setting 'recall.strenght'; did you mean 'recall.strength'" in said
    assert finetune("--recipe=self-replay", "--set", "recall.strength", "-2", out="new") == 2
    assert "strength must be a finite number ≥ 0, got -2" in capsys.readouterr().err
    assert not Path("new").exists()


def test_early_stopping(capsys):
    write("dev.jsonl", [{"prompt": "two plus two is", "completion": "zero"}] * 2)  # never learned
    stopping = ["--validation=dev.jsonl", "--patience=2", "--evaluate-every=3", "--max-updates=40"]
    assert finetune("--recipe=recadam", *stopping) == 0
    assert "The weights of update 3 of 9 are kept." in capsys.readouterr().out
    rows = json.loads(read("out/training.json"))
    losses = {row["update"]: row.get("forgetting/validation/nll") for row in rows}
    assert losses[3] == min(losses[update] for update in (3, 6, 9))
    assert rows[-1]["best_update"] == 3
    assert finetune("--recipe=recadam", *stopping, "--json", out="again") == 0
    assert json.loads(capsys.readouterr().out)["best_update"] == 3
    assert all(torch.equal(a, b) for a, b in zip(*map(values, ("out", "again")), strict=True))
    for wrong, said in (
        (["--patience=2"], "patience needs rows for validation"),
        (["--validation=./train.jsonl", "--patience=2"], "validation and data are both ./train"),
        (["--validation=gone.jsonl"], "no such file: gone.jsonl"),
        (["--validation=0.6"], "validation must be a file or a share up to 0.5, got 0.6"),
        (["--validation=0.1"], "a share of 0.1 of 8 rows is not a row: hold out more"),
        ([*stopping, "--recipe=sfa"], "SFA changes the weights after the last update"),
    ):
        assert finetune(*wrong, out="new") == 2
        assert said in capsys.readouterr().err


def test_the_last_update_is_measured_too(capsys):
    write("dev.jsonl", ROWS[:2])
    stopping = ["--validation=dev.jsonl", "--patience=9", "--evaluate-every=2", "--max-updates=5"]
    assert finetune("--recipe=standard", *stopping, "--json") == 0
    assert json.loads(capsys.readouterr().out)["best_update"] == 5
    rows = json.loads(read("out/training.json"))
    assert [row["update"] for row in rows if "best_update" in row] == [2, 4, 5]


def test_a_share_of_the_rows_is_held_out(capsys):
    rows = [{"ask": f"two plus {i} is", "reply": "four", "n": i} for i in range(8)]
    write("train.jsonl", rows)
    columns = ["--columns", "question=ask", "answer=reply"]
    assert finetune("--validation=0.25", "--evaluate-every=2", *columns) == 0
    assert "standard: 6 samples\n" in capsys.readouterr().err
    measured = [row for row in json.loads(read("out/training.json")) if row["update"] == 2]
    write("train.jsonl", [row for row in rows if row["n"] % 4 != 3])
    write("valid.jsonl", [row for row in rows if row["n"] % 4 == 3])
    given = ["--validation=valid.jsonl", "--evaluate-every=2", *columns]
    assert finetune(*given, out="other") == 0
    assert measured[0] in json.loads(read("other/training.json"))
    assert "validation: 0.25\n" in read("out/config.yaml")


def values(folder):
    return weights(folder).values()


def read(file):
    return Path(file).read_text()


def test_data_of_an_old_task(capsys):
    assert finetune("--recipe=rehearsal") == 2
    assert "pass it as old_data= (--old-data on the command line)" in capsys.readouterr().err
    write("old.jsonl", [{"text": "the cat sat on the mat"}] * 4)
    assert finetune("--recipe=rehearsal", "--old-data=old.jsonl") == 0
    assert "old_data: old.jsonl\n" in Path("out/config.yaml").read_text()


def test_lora_saves_its_adapter():
    pytest.importorskip("peft", reason="the peft extra is not installed")
    assert finetune("--recipe=lora") == 0
    assert main(["measure", str(MODEL), "out", "--context-free=2"]) == 0


@pytest.mark.parametrize(
    "row",
    [
        {"text": "the cat sat on the mat . " * 20},
        {"question": "two plus two is", "answer": "four"},
    ],
)
def test_other_rows(row, tmp_path):
    (tmp_path / "train.jsonl").write_text(json.dumps(row))
    assert finetune() == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--recipe=recadm"], "did you mean 'recadam'"),
        (["--recipe=mine.yaml"], "no such recipe file: mine.yaml"),
        (["--lr=0"], "lr must be a finite number > 0"),
        (["--data=gone.jsonl"], "no such file: gone.jsonl"),
        (["--data=some/dataset:train"], "is neither a local file or directory nor a dataset on"),
        (["--data=folder"], "neither a dataset saved by datasets.save_to_disk, nor a dir"),
        (["--head=regression"], "needs rows with a text or an image and a label"),
        (["--data=odd.jsonl"], "has the columns x, but training needs"),
        (["--data=empty.jsonl"], "empty.jsonl is empty"),
        (["--model=/no/model"], "no such model directory"),
        (["--out=train.jsonl"], "is a file"),
        (["--config=gone.yaml"], "gone.yaml: No such file"),
    ],
)
def test_bad_input_is_one_sentence(given, words, tmp_path, capsys, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "folder").mkdir()
    (tmp_path / "odd.jsonl").write_text('{"x": 1}')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert finetune(*given) == 2
    said = capsys.readouterr().err
    assert words in said.splitlines()[-1]
    assert "Traceback" not in said


def test_a_model_is_not_written_over(capsys):
    assert finetune() == 0
    assert finetune() == 2
    assert "already contains a model" in capsys.readouterr().err


def command(out):
    given = [f"--model={MODEL}", "--data=train.jsonl", f"--out={out}"]
    return [
        *given,
        "--recipe=recadam+flow",
        "--max-updates=40",
        "--save-seconds=0",
        "--batch-size=2",
    ]


def test_a_killed_run_goes_on_to_the_bit(tmp_path, capsys, monkeypatch):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [sys.executable, "-m", "holdfast", "finetune", *command("stopped")], env=environment,
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        until = time.monotonic() + 60
        while not (tmp_path / "stopped" / "run.pt").exists():
            assert time.monotonic() < until
            assert started.poll() is None
            time.sleep(0.01)
    finally:
        started.send_signal(signal.SIGKILL)
        started.wait()
    assert not (tmp_path / "stopped" / "config.json").exists()
    # Other settings are refused, in a sentence; the same ones go on.
    assert main(["finetune", *command("stopped"), "--lr=0.5"]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert "stopped contains an unfinished run with lr None, not 0.5" in said[0]
    with monkeypatch.context() as later:  # in a version with another default
        later.setattr("holdfast.methods.auto._HIGHEST", 1e-4)
        assert main(["finetune", *command("stopped")]) == 0
    assert "note: continues after update " in capsys.readouterr().err
    assert main(["finetune", *command("whole")]) == 0
    stopped, whole = weights("stopped"), weights("whole")
    assert all(torch.equal(stopped[name], whole[name]) for name in whole)
    assert not {"run.pt", "history.jsonl", "seconds"} & {p.name for p in Path("stopped").iterdir()}
    assert Path("stopped/training.json").read_text() == Path("whole/training.json").read_text()


CLASSES = [{"text": "the cat sat", "label": "cat"}, {"text": "a dog ran", "label": "dog"}] * 6
NUMBERS = [{"text": "two plus two is four", "label": 4.5}, {"text": "a dog", "label": -1}] * 6
LONGER = ["--max-updates=25", "--batch-size=4", "--lr=0.02"]


def write(name, rows):
    Path(name).write_text("\n".join(map(json.dumps, rows)))
    return name


def scores(base, tuned, target, capsys):
    capsys.readouterr()
    assert main(["measure", base, tuned, f"--target={target}", "--json", "--no-drift"]) == 0
    report = json.loads(capsys.readouterr().out)
    return {s["metric"]: (s["before"]["value"], s["after"]["value"]) for s in report["scores"]}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("bert", "standard"),
        ("bert", "lp-ft+recadam+flow"),
        ("bert", "lora"),
        ("llama", "recadam"),
        ("llama", "lora"),
    ],
)
def test_a_new_head_for_classes(kind, recipe, capsys):
    source = {"bert": save_bert, "llama": save_llama}[kind]("base")
    data, more = write("rows.jsonl", CLASSES), ["--head=classification"] * (kind == "llama")
    given = [f"--model={source}", f"--data={data}", f"--recipe={recipe}", *LONGER, *more]
    assert main(["finetune", *given, "--out=tuned"]) == 0
    assert "new head (2 classes): " in capsys.readouterr().err
    config = json.loads(Path("tuned/config.json").read_text())
    assert config["id2label"] == {"0": "cat", "1": "dog"}
    found = scores(source, "tuned", data, capsys)
    assert found["accuracy"] == (0.5, 1.0)
    assert found["loss"][0] == pytest.approx(0.693, abs=0.1)  # as drawn: it knows nothing
    assert found["loss"][1] < 0.3


def test_a_head_is_fitted_and_then_tuned_with(capsys):
    source, data = save_bert("base"), write("rows.jsonl", CLASSES)
    given = [f"--data={data}", *LONGER]
    assert main(["finetune", f"--model={source}", *given, "--recipe=linear-probe", "--out=1"]) == 0
    assert main(["finetune", "--model=1", *given, "--recipe=lora+flow", "--out=2"]) == 0
    assert "lora+flow: 12 samples\n" in capsys.readouterr().err  # the head is no longer new
    assert scores("1", "2", data, capsys)["accuracy"][1] == 1.0


def test_a_new_head_for_numbers(capsys):
    source, data = save_bert("base"), write("rows.jsonl", NUMBERS)
    assert main(["finetune", f"--model={source}", f"--data={data}", *LONGER, "--out=tuned"]) == 0
    config = json.loads(Path("tuned/config.json").read_text())
    assert config["problem_type"] == "regression"
    found = scores(source, "tuned", data, capsys)
    assert found["mse"][1] < 1 < found["mse"][0]
    assert found["pearson"][1] > 0.9


@pytest.mark.parametrize("saved", [False, True])
def test_images_in_folders(saved, capsys):
    data, test, source = save_images(Path("train")), save_images(Path("test"), n=2), save_vit("vit")
    if saved:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        read = datasets.load_dataset("imagefolder", data_dir="train", cache_dir="cache")
        read.save_to_disk("disk")
        data = "disk:train"
    given = [f"--model={source}", f"--data={data}", "--recipe=lp-ft+recadam", *LONGER]
    assert main(["finetune", *given, "--out=tuned"]) == 0
    assert Path("tuned/preprocessor_config.json").exists()
    found = scores(source, "tuned", test, capsys)
    assert found["accuracy"][0] < 0.6
    assert found["accuracy"][1] > 0.9


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--data=part.jsonl"], "part.jsonl: 1 rows have no label; the first is row 12"),
        (["--recipe=lora+flow"], "preset linear-probe"),
        (["--head=none"], "no head for rows.jsonl: ask for a new one with --head classification"),
        (["--data=images"], "transformers has no image classifier for bert"),
        (["--data=images", "--model=vit"], "images/red/3.png cannot be read as an image"),
        (["--data=images", "--model=bare"], "has no image processor"),
        (["--model=train.jsonl"], "train.jsonl is not a model"),
    ],
)
def test_labels_that_do_not_fit_are_one_sentence(given, words, capsys):
    write("part.jsonl", [*CLASSES, {"text": "the cat"}]), write("rows.jsonl", CLASSES)
    save_bert("base"), save_vit("vit"), save_vit("bare"), save_images(Path("images"))
    Path("images/red/3.png").write_text("not an image")
    Path("bare/preprocessor_config.json").unlink()
    capsys.readouterr()
    start = ["--model=base", "--data=rows.jsonl", "--out=tuned", *LONGER]
    assert main(["finetune", *start, *given]) == 2
    said = capsys.readouterr().err
    assert words in said.strip().splitlines()[-1]
    assert "Traceback" not in said


def test_a_run_that_diverges_fails(capsys):
    assert finetune("--lr=1e30", "--clip-norm=1", "--json") != 0
    said = capsys.readouterr()
    assert said.out == ""
    assert "the training diverged: the loss of update 3 is nan. Lower the learning rate" in said.err
    assert not Path("out/model.safetensors").exists()


def test_json_is_always_valid(capsys, monkeypatch):
    """Also where a figure is NaN, as the distance of DoRA is."""
    monkeypatch.setattr("holdfast.evaluate.watch.effective_distance", lambda *_: float("nan"))
    assert finetune("--json") == 0

    def refuse(name):
        raise AssertionError(name)

    json.loads(capsys.readouterr().out, parse_constant=refuse)
    log = json.loads(Path("out/training.json").read_text(), parse_constant=refuse)
    assert log[-1]["forgetting/distance"] == "NaN"
