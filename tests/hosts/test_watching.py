"""A watch in the real hosts: its figures are in their logs."""

import pytest
import torch

from holdfast import Recipe, Reference
from holdfast.forgetting.watch import Watch, curves_of
from holdfast.hosts.watching import watch_lightning, watch_trainer


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
        assert distance.steps == (2, 4)
        assert 0 < distance.values[0] < distance.values[1]
        assert distance.values[1] < base.distance(trainer.model).total  # of update 5
    history = [c for c in curves_of(plain.state.log_history) if c.name != "loss"]
    assert history == [c for c in curves_of(ours.state.log_history) if c.name != "loss"]


@pytest.mark.filterwarnings("ignore")
def test_in_lightning(tmp_path):
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    from lightning.pytorch import Callback, LightningModule, Trainer
    from test_lightning import make_data, make_model

    class Plain(LightningModule):
        def __init__(self):
            super().__init__()
            self.model = make_model()

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    seen = []

    class Note(Callback):
        def on_train_batch_end(self, trainer, *_):
            if "forgetting/distance" in trainer.logged_metrics:
                seen.append(
                    (trainer.global_step, float(trainer.logged_metrics["forgetting/distance"]))
                )

    module = Plain()
    watch = watch_lightning(Watch(module.model, every=2), module.model)
    trainer = Trainer(
        max_epochs=2, accumulate_grad_batches=2, callbacks=[watch, Note()], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", log_every_n_steps=1,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(make_data(), batch_size=3))
    assert {step for step, _ in seen} >= {2, 4}
    assert seen[0][1] < seen[-1][1]
