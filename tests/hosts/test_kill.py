"""Kill runs with SIGKILL at random moments and resume: the weights equal an uninterrupted run's.

A kill comes a fraction of a second after a random update. A run that will be killed waits before
its end, so that every kill hits a run that is still training.
"""

import random
import signal
import sys
import time
import warnings
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

import setting
import test_hf
import test_replay_in_hosts
import transformers

from forks import start
from holdfast import Recipe
from holdfast.registry import find, methods

HOSTS = ["raw", "hf"]
IDENTITIES = [type(method) for _, method in Recipe()]
ALONE = [e for e in methods() if getattr(e.cls, "least_models", 1) == 1]
METHODS = [
    "standard", "flow+recadam+l2-sp", *(e.name for e in ALONE if e.cls not in IDENTITIES),
]  # fmt: skip
KILLS = 2  # of each method in each host
UPDATES = 30


class Teller(transformers.TrainerCallback):
    """Writes the number of each update into a file."""

    def __init__(self, folder, killed):
        self.folder, self.killed = folder, killed

    def tell(self, update):
        beside = self.folder / "beside"
        beside.write_text(str(update))
        beside.replace(self.folder / "update")
        if self.killed:
            time.sleep(0.02 if update < UPDATES else 600)

    def on_step_end(self, args, state, *_, **__):
        self.tell(state.global_step)


def train(host, names, folder, killed):
    """Start or go on, and save the weights."""
    warnings.simplefilter("ignore")
    numpy.random.seed()  # a fork has the numbers of its server; a new process has others
    entries = [find(name) for name in names.split("+") if name != "standard"]
    recipe = setting.recipe_of(*map(setting.method_of, entries))
    teller = Teller(folder, killed)
    if host == "raw":
        model = setting.train(
            recipe, max_updates=UPDATES, checkpoint=folder / "run.pt", save_every=1, log_every=1,
            log=lambda values: teller.tell(values["update"]),
        )  # fmt: skip
    else:
        trainer = make_trainer(host, recipe, folder, setting.setting_of(*entries))
        trainer.add_callback(teller)
        trainer.train(resume_from_checkpoint=True)
        model = trainer.model
    torch.save(model.state_dict(), folder / "final.pt")


def make_trainer(host, recipe, folder, kind):
    options = {
        "save_strategy": "steps", "save_steps": 1, "save_total_limit": 3, "max_steps": UPDATES,
        "per_device_train_batch_size": 4, "logging_steps": 10,
    }  # fmt: skip
    if host in ("dpo", "grpo"):
        import test_trl_losses

        # One epoch: TRL's sampler starts again with its first order when GRPO resumes.
        return test_trl_losses.MAKE[host](recipe, folder, repeat=8, **options)
    if kind is setting.Texts:
        return test_replay_in_hosts.make_trainer(recipe, folder, **options)
    model, old = test_hf.make_model(torch.float32, 0.1), test_hf.make_data(8, seed=1)
    return test_hf.make_trainer(recipe, folder, model, options=options, old_data=old)


def begun(host, names, folder, killed):
    folder.mkdir(exist_ok=True)
    cache = str(folder / "cache")
    log = folder / "said.txt"
    return start(train, host, names, folder, killed, log=log, HOLDFAST_CACHE=cache)


def finished(host, names, folder):
    process = begun(host, names, folder, killed=False)
    process.join()
    assert process.exitcode == 0, (folder / "said.txt").read_text()[-3000:]
    return torch.load(folder / "final.pt", weights_only=True)


def kill(host, names, folder, update, later):
    """Start or go on, and kill it ``later`` seconds after an update."""
    told = folder / "update"
    told.unlink(missing_ok=True)
    process = begun(host, names, folder, killed=True)
    until = time.monotonic() + 300
    while not told.exists() or int(told.read_text()) < update:
        assert process.exitcode is None, (folder / "said.txt").read_text()[-3000:]
        assert time.monotonic() < until
        time.sleep(0.002)
    time.sleep(later)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


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
