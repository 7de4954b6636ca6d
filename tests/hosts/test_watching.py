"""A watch in the real hosts: its values are in their logs."""

import importlib

import pytest
import torch

from holdfast import L2SP, NoRecall, RecAdamUpdate, Recipe, Reference, SelfReplay
from holdfast.evaluate.watch import Watch, curves_of
from holdfast.hosts.watching import watch_lightning, watch_trainer
from ranks import run_on_ranks
from tracked import in_tensorboard


def test_in_the_trainer_with_a_recipe_and_without(tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="the hf extra is not installed")
    from test_hf import make_args, make_data, make_model, make_trainer
    from transformers import Trainer

    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3, "seed": 3}
    model = make_model()
    plain = Trainer(model=model, args=make_args(tmp_path, **options), train_dataset=make_data())
    ours = make_trainer(Recipe(), tmp_path, options=options)
    for trainer in (plain, ours):
        watch_trainer(trainer, Watch(trainer.model, every=2))
        base = Reference.of(trainer.model)
        trainer.train()
        (distance,) = (c for c in curves_of(trainer.state.log_history) if c.name == "distance")
        assert distance.steps == (0, 2, 4)
        assert 0 == distance.values[0] < distance.values[1] < distance.values[2]
        assert distance.values[2] < base.distance(trainer.model).total  # of update 5
        (loss,) = (c for c in curves_of(trainer.state.log_history) if c.name == "loss")
        assert loss.steps == (1, 2, 3, 4, 5)  # the trainer's own log is not disturbed
    assert curves_of(plain.state.log_history) == curves_of(ours.state.log_history)


@pytest.mark.parametrize("host", ["hf", "trl"])
def test_the_trainers_own_trackers_get_all_figures(tmp_path, monkeypatch, host):
    pytest.importorskip("tensorboard", reason="the tracking extra is not installed")
    pytest.importorskip(host.replace("hf", "transformers"), reason=f"no extra {host}")
    make_trainer = importlib.import_module(f"test_{host}").make_trainer
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    recall = SelfReplay(budget=0.5, share=0.25, fewest=1, length=8) if host == "trl" else NoRecall()
    recipe = Recipe(recall=recall, update=RecAdamUpdate(), penalties=(L2SP(strength=0.1),))
    trainer = make_trainer(recipe, tmp_path, options={"report_to": "tensorboard"})
    watch_trainer(trainer, Watch(trainer.model, every=2))
    trainer.train()
    figures, _ = in_tensorboard(tmp_path / "board")
    wanted = {"loss", "learning_rate", "lam", "pull", "distance", "penalty/L2SP"}
    wanted |= {"forgetting/distance"} | ({"kl", "strength"} if host == "trl" else set())
    for name in wanted:
        logged = [(r["step"], r[name]) for r in trainer.state.log_history if name in r]
        assert logged
        close = [(step, pytest.approx(value, rel=1e-6)) for step, value in logged]
        assert figures[f"train/{name}"] == close


@pytest.mark.filterwarnings("ignore")
def test_in_lightning(tmp_path):
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
    from test_lightning import make_data, make_model

    class Plain(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    class Notes(Logger):
        name, version, seen = "notes", 0, []

        def log_metrics(self, metrics, step=None):
            self.seen.append((step, metrics["forgetting/distance"]))

        def log_hyperparams(self, *_):
            pass

    module = Plain()
    base, notes = Reference.of(module.model), Notes()
    watch = watch_lightning(Watch(module.model, every=2), module.model)
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=[watch], logger=notes,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", log_every_n_steps=3,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(make_data(), batch_size=3))
    assert [step for step, _ in notes.seen] == [2, 4]
    assert notes.seen[1][1] == base.distance(module.model).total


@pytest.mark.soak
def test_adapters_on_two_ranks(tmp_path):
    """FSDP2 shards A and B, but the distance covers all weights."""
    pytest.importorskip("peft", reason="the peft extra is not installed")
    model, watch = adapted()
    alone = watch(1, model)
    run_on_ranks(2, watched_on_ranks, tmp_path / "seen.pt", folder=tmp_path)
    seen = torch.load(tmp_path / "seen.pt")
    assert seen == pytest.approx(alone, rel=1e-6)
    assert alone["forgetting/distance"] > 0.1


def adapted():
    import peft

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
    watch = Watch(model, every=1)
    config = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    model = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(torch.randn(p.shape, generator=generator))
    return model, watch


def watched_on_ranks(out):
    from torch.distributed.fsdp import fully_shard

    model, watch = adapted()
    seen = watch(1, fully_shard(model))
    if torch.distributed.get_rank() == 0:
        torch.save(seen, out)
