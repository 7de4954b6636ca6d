"""Kill runs with SIGKILL at random moments and resume: the weights equal an uninterrupted run's.

A kill comes a fraction of a second after a random update. A run that will be killed waits before
its end, so that every kill hits a run that is still training.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from holdfast import Recipe
from holdfast.registry import methods

pytest.importorskip("transformers", reason="the hf extra is not installed")

TESTS = Path(__file__).parents[1]
HOSTS = ["raw", "hf"]
IDENTITIES = [type(method) for _, method in Recipe()]
ALONE = [e for e in methods() if getattr(e.cls, "least_models", 1) == 1]
METHODS = [
    "standard", "flow+recadam+l2-sp", *(e.name for e in ALONE if e.cls not in IDENTITIES),
]  # fmt: skip
KILLS = 2  # of each method in each host
UPDATES = 30
SCRIPT = """
import os, pathlib, sys, time, warnings
sys.path[:0] = [{tests!r}, {hosts!r}, {contract!r}]
import torch
torch.set_num_threads(1)
warnings.simplefilter("ignore")
host, names, folder, killed = sys.argv[1:]
import setting
from holdfast.registry import find
entries = [find(name) for name in names.split("+") if name != "standard"]
recipe = setting.recipe_of(*map(setting.method_of, entries))
def tell(update):
    beside = pathlib.Path(folder, "beside")
    beside.write_text(str(update))
    os.replace(beside, pathlib.Path(folder, "update"))
    if killed == "True":
        time.sleep(0.02 if update < {updates} else 600)
if host == "raw":
    model = setting.train(
        recipe, max_updates={updates}, checkpoint=folder + "/run.pt", save_every=1, log_every=1,
        log=lambda values: tell(values["update"]),
    )
else:
    import test_hf, test_replay_in_hosts, transformers
    class Tell(transformers.TrainerCallback):
        def on_step_end(self, args, state, *_, **__):
            tell(state.global_step)
    options = {{"save_strategy": "steps", "save_steps": 1, "save_total_limit": 3,
               "per_device_train_batch_size": 4, "max_steps": {updates}, "logging_steps": 10}}
    if host in ("dpo", "grpo"):
        import test_trl_losses
        # One epoch: TRL's sampler starts again with its first order when GRPO resumes.
        trainer = test_trl_losses.MAKE[host](recipe, folder, repeat=8, **options)
        trainer.add_callback(Tell())
    elif setting.setting_of(*entries) is setting.Texts:
        trainer = test_replay_in_hosts.make_trainer(recipe, folder, **options)
        trainer.add_callback(Tell())
    else:
        trainer = test_hf.make_trainer(
            recipe, folder, test_hf.make_model(torch.float32, 0.1), options=options,
            callbacks=[Tell()], old_data=test_hf.make_data(8, seed=1),
        )
    trainer.train(resume_from_checkpoint=True)
    model = trainer.model
torch.save(model.state_dict(), folder + "/final.pt")
"""


def start(host, names, folder, killed):
    folder.mkdir(exist_ok=True)
    script = folder / "run.py"
    folders = {"tests": TESTS, "hosts": TESTS / "hosts", "contract": TESTS / "contract"}
    script.write_text(
        SCRIPT.format(updates=UPDATES, **{name: str(path) for name, path in folders.items()})
    )
    with open(folder / "stderr.txt", "w") as errors:
        return subprocess.Popen(
            [sys.executable, script, host, names, folder, str(killed)],
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HOLDFAST_CACHE": str(folder / "cache")},
        )


def finished(host, names, folder):
    process = start(host, names, folder, killed=False)
    assert process.wait() == 0, (folder / "stderr.txt").read_text()[-3000:]
    return torch.load(folder / "final.pt", weights_only=True)


def kill(host, names, folder, update, later):
    """Start or go on, and kill it ``later`` seconds after an update."""
    told = folder / "update"
    told.unlink(missing_ok=True)
    process = start(host, names, folder, killed=True)
    begun = time.monotonic()
    while not told.exists() or int(told.read_text()) < update:
        assert process.poll() is None, (folder / "stderr.txt").read_text()[-3000:]
        assert time.monotonic() - begun < 300
        time.sleep(0.002)
    time.sleep(later)
    process.send_signal(signal.SIGKILL)
    return process.wait() == -signal.SIGKILL


def kill_and_resume(host, names, tmp_path):
    draw = random.Random(f"{host} {names}")
    updates = sorted(draw.sample(range(1, UPDATES), KILLS))
    stopped = sum(kill(host, names, tmp_path / "cut", n, draw.random() / 10) for n in updates)
    assert stopped == KILLS
    ours = finished(host, names, tmp_path / "cut")
    theirs = finished(host, names, tmp_path / "whole")
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


def test_each_host_is_killed_at_least_twenty_times():
    assert KILLS * len(METHODS) >= 20
    assert {"standard", "rehearsal", "l1-sp", "mas", "lp-ft", "random-init"} <= set(METHODS)


@pytest.mark.soak
@pytest.mark.parametrize("names", METHODS)
@pytest.mark.parametrize("host", HOSTS)
def test_every_method(host, names, tmp_path):
    kill_and_resume(host, names, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("host", ["dpo", "grpo"])
def test_the_trainers_of_trl(host, tmp_path):
    pytest.importorskip("trl", reason="the trl extra is not installed")
    kill_and_resume(host, "self-replay+recadam", tmp_path)
