"""Kill −9 at random moments, go on: the weights of a run that nobody stopped, to the bit."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")

TESTS = Path(__file__).parents[1]
SCRIPT = """
import sys, time, warnings
sys.path[:0] = [{tests!r}, {hosts!r}, {contract!r}]
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
host, names, folder, slow = sys.argv[1:]
from holdfast import Recipe
recipe = Recipe.preset(names)
if host == "raw":
    import setting
    def breathe(values):
        time.sleep(float(slow))
    model = setting.train(
        recipe, max_updates=30, checkpoint=folder + "/run.pt", save_every=1, log=breathe,
        log_every=1,
    )
else:
    import test_hf, transformers
    class Breathe(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            time.sleep(float(slow))
    options = {{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3,
               "per_device_train_batch_size": 4, "num_train_epochs": 10, "logging_steps": 10}}
    trainer = test_hf.make_trainer(
        recipe, folder, test_hf.make_model(torch.float32, 0.1), options=options,
        callbacks=[Breathe()],
    )
    trainer.train(resume_from_checkpoint=True)
    model = trainer.model
torch.save(model.state_dict(), folder + "/final.pt")
"""
METHODS = [
    "standard", "recadam", "flow", "mofo", "l2-sp", "ewc", "sfa", "mixout", "hft",
    "gradual-unfreezing", "distill", "lora+wise-ft", "rehearsal", "sgd",
]  # fmt: skip


def start(host, names, folder, slow, script):
    with open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            [sys.executable, script, host, names, folder, str(slow)],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_CACHE": str(folder / "cache")},
        )


def killed_and_resumed(host, names, tmp_path, kills, seed):
    script = tmp_path / "run.py"
    script.write_text(
        SCRIPT.format(
            tests=str(TESTS), hosts=str(TESTS / "hosts"), contract=str(TESTS / "contract")
        )
    )
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    process = start(host, names, whole, 0, script)
    assert process.wait() == 0, (whole / "stderr.txt").read_text()[-3000:]
    draw, stopped = random.Random(seed), 0
    for _ in range(kills):
        process = start(host, names, cut, 0.05, script)
        begun = time.monotonic()
        while not any(cut.glob("run.pt")) and not any(cut.glob("checkpoint-*")):
            assert process.poll() is None, (cut / "stderr.txt").read_text()[-3000:]
            time.sleep(0.01)
            assert time.monotonic() - begun < 120
        time.sleep(draw.random())
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            stopped += 1
        process.wait()
    process = start(host, names, cut, 0, script)
    assert process.wait() == 0, (cut / "stderr.txt").read_text()[-3000:]
    assert stopped
    ours, theirs = (torch.load(f / "final.pt", weights_only=True) for f in (cut, whole))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("host", ["raw", "hf"])
def test_a_sample(host, tmp_path):
    killed_and_resumed(host, "flow+recadam+l2-sp", tmp_path, kills=2, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("names", METHODS)
@pytest.mark.parametrize("host", ["raw", "hf"])
def test_every_method(host, names, tmp_path):
    if host == "hf" and names == "rehearsal":
        names = "flow+recadam+l2-sp"  # which has no data of its own here
    killed_and_resumed(host, names, tmp_path, kills=2, seed=f"{host} {names}")
