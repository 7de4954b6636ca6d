"""``holdfast finetune`` on two gloo ranks, started by torchrun and by ``accelerate launch``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("accelerate", reason="the hf extra is not installed")
pytest.importorskip("tensorboard", reason="the tracking extra is not installed")

from holdfast.builtin import MODEL  # noqa: E402
from holdfast.cli import main  # noqa: E402
from tracked import in_tensorboard  # noqa: E402

ROWS = [{"prompt": f"two plus {i} is", "completion": "four " * (i % 3) + "five"} for i in range(11)]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = ["-m", "accelerate.commands.launch", "--num_processes=2"]
FSDP2 = [*ACCELERATE, "--use_fsdp", "--fsdp_version=2"]
#: Accelerate ignores FSDP on CPUs; on any other device it does not look at which.
SHARDED = """
import sys
from accelerate import PartialState
from accelerate.utils import DistributedType

PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
from holdfast.cli import main
sys.exit(main(sys.argv[1:]))
"""
#: Only the second process fails, in the middle of the training.
FAILS = """
import os, sys
import holdfast.cli.finetune as finetune
from holdfast.cli import main

class Watch:
    def __init__(self, *_, **__):
        pass
    def __call__(self, update, model):
        if os.environ["RANK"] == "1" and update == 2:
            raise ValueError("no memory on the second GPU")
        return {}

finetune.watch_training = Watch
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))


def command(out, recipe, batch_size, *more):
    given = [f"--model={MODEL}", "--data=train.jsonl", f"--out={out}", f"--recipe={recipe}"]
    return ["finetune", *given, f"--batch-size={batch_size}", "--lr=1e-3", "--epochs=2", *more]


def start(arguments, launcher=TORCHRUN, script=None):
    what = ["-m", "holdfast"]
    if script is not None:
        Path("script.py").write_text(script)
        what = ["script.py"]
    return subprocess.Popen(
        [sys.executable, *launcher, *what, *arguments], text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def launch(arguments, **options):
    started = start(arguments, **options)
    out, err = started.communicate(timeout=600)
    return started.returncode, out, err


def weights(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


def assert_same_as_one_process(folder, recipe, size, tolerance=1e-5, rare=0.0):
    """``rare`` is the share of entries of a weight that may differ by more."""
    assert main(command("one", recipe, size)) == 0
    found, wanted = weights(folder), weights("one")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        differ = (found[name] - tensor).abs() >= tolerance
        assert differ.float().mean() <= rare, name
    base = weights(MODEL)
    moved = (tensor - base.get(name, 0) for name, tensor in found.items())
    assert any(change.abs().max() > 1e-3 for change in moved)


def rows_of(folder):
    return json.loads(Path(folder, "training.json").read_text())


def test_two_processes_are_one(tmp_path):
    more = ["--accumulate=2", "--json", "--report-to=tensorboard"]
    status, out, err = launch(command("two", "recadam+flow", 2, *more))
    assert status == 0, err
    assert json.loads(out)["updates"] == 4  # printed once
    assert "note: 2 processes, 8 samples per update\n" in err
    assert err.count("recadam+flow: 11 samples") == 1
    assert "Warning" not in err
    assert {".holdfast", "run.pt", "history.jsonl"}.isdisjoint(os.listdir("two"))
    assert_same_as_one_process("two", "recadam+flow", 8)
    for ours, theirs in zip(rows_of("two"), rows_of("one"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3)
    (file,) = Path("two/tracking/tensorboard/two").iterdir()  # of the first process
    figures, _ = in_tensorboard(file.parent)
    assert [step for step, _ in figures["loss"]] == [1, 2, 3, 4]


@pytest.mark.soak
def test_gradient_checkpointing_with_parameters_that_have_no_gradient():
    more = ["--gradient-checkpointing"]
    status, _, err = launch(command("two", "gradual-unfreezing", 4, *more))
    assert status == 0, err
    assert_same_as_one_process("two", "gradual-unfreezing", 8)


@pytest.mark.parametrize(
    "recipe",
    [
        "distill+recadam+wise-ft",
        *(pytest.param(r, marks=pytest.mark.soak) for r in ["lora", "mofo"]),
    ],
)
def test_a_sharded_model_is_saved_whole(recipe):
    status, _, err = launch(command("two", recipe, 2), launcher=FSDP2, script=SHARDED)
    assert status == 0, err
    # MoFO updates the entries with the largest momentum: rounding decides between equal ones.
    assert_same_as_one_process("two", recipe, 4, rare=2e-4 if recipe == "mofo" else 0.0)
    if recipe != "lora":
        ours, theirs = (json.loads(Path(out, "config.json").read_text()) for out in ("two", "one"))
        assert ours == theirs  # without a trace of the sharding


def kill_and_go_on(**options):
    given = command("cut", "recadam+flow", 2, "--save-seconds=0", "--max-updates=40")
    started = start(given, **options)
    until = time.monotonic() + 300
    while not Path("cut/run.pt").exists():
        assert time.monotonic() < until
        assert started.poll() is None, started.communicate()[1]
        time.sleep(0.01)
    for process in [*psutil.Process(started.pid).children(recursive=True), started]:
        process.kill()
    started.communicate()
    assert not Path("cut/config.json").exists()
    for out in ("cut", "whole"):
        given[3] = f"--out={out}"
        status, _, err = launch(given, **options)
        assert status == 0, err
    found, wanted = weights("cut"), weights("whole")
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert rows_of("cut") == rows_of("whole")


@pytest.mark.soak
def test_killed_processes_go_on_to_the_bit():
    kill_and_go_on()


@pytest.mark.soak
def test_killed_processes_of_a_sharded_model_go_on_to_the_bit():
    kill_and_go_on(launcher=FSDP2, script=SHARDED)


@pytest.mark.soak
@pytest.mark.parametrize("options", [{}, {"launcher": FSDP2, "script": SHARDED}], ids=["", "fsdp2"])
def test_early_stopping_keeps_the_weights_of_one_process(options):
    never = {"prompt": "two plus two is", "completion": "zero"}
    Path("dev.jsonl").write_text(json.dumps(never))
    stop = ["--validation=dev.jsonl", "--patience=2", "--evaluate-every=3", "--max-updates=40"]
    status, out, err = launch([*command("two", "recadam", 2, *stop)], **options)
    assert status == 0, err
    assert main([*command("one", "recadam", 4, *stop)]) == 0
    (ours, theirs) = (rows_of(folder)[-1] for folder in ("two", "one"))
    assert ours["update"] == theirs["update"] < 40
    assert ours["best_update"] == theirs["best_update"] == ours["update"] - 6
    found, wanted = weights("two"), weights("one")
    assert all((found[name] - wanted[name]).abs().max() < 1e-5 for name in wanted)
    assert f"The weights of update {ours['best_update']} of {ours['update']} are kept" in out


def sentences(err):
    return [line for line in err.splitlines() if line.startswith("holdfast: ")]


def test_an_error_of_one_process_ends_all_with_one_sentence():
    status, out, err = launch(command("two", "standard", 2), script=FAILS)
    assert status != 0
    assert sentences(err) == ["holdfast: no memory on the second GPU"]
    assert out == ""
    assert not Path("two/config.json").exists()


@pytest.mark.soak
def test_an_error_of_all_processes_is_said_once():
    status, _, err = launch([*command("two", "standard", 2), "--data=gone.jsonl"])
    assert status != 0
    assert sentences(err) == ["holdfast: no such file: gone.jsonl"]


@pytest.mark.soak
def test_accelerate_launch():
    status, _, err = launch(command("two", "standard", 2), launcher=[*ACCELERATE, "--multi_gpu"])
    assert status == 0, err
    assert_same_as_one_process("two", "standard", 4)


def test_sharding_needs_gpus(monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main(command("out", "standard", 2)) == 2
    assert "launch without --use_fsdp" in capsys.readouterr().err


def test_other_commands_run_in_one_process(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["measure", "base", "tuned"]) == 2
    assert "holdfast measure runs in one process" in capsys.readouterr().err
    monkeypatch.setenv("RANK", "1")
    assert main(["measure", "base", "tuned"]) == 2
    assert capsys.readouterr().err == ""
