"""The Trainer on two ranks: an objective's loss gives the weights of one process.

(The Trainer's own loss does not, of a classifier: its two ranks differ from one by themselves.)
"""

import pytest
import torch

from ranks import run_on_ranks

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")

from holdfast import Recipe  # noqa: E402
from hosts import test_hf  # noqa: E402


def train(names, folder, batch_size):
    options = {
        "per_device_train_batch_size": batch_size, "ddp_find_unused_parameters": False,
        "per_device_eval_batch_size": 3,
    }  # fmt: skip
    trainer = test_hf.make_trainer(
        Recipe.preset(names), folder, options=options, eval_dataset=test_hf.make_data(12, seed=2)
    )
    trainer.train()
    plain = transformers.Trainer(
        model=trainer.model, args=trainer.args, eval_dataset=trainer.eval_dataset
    )
    # transformers' own evaluation on several ranks need not be that of one: ours is the same.
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])
    return trainer.model.state_dict()


def on_ranks(names, folder, out):
    state = train(names, folder, 6)
    if torch.distributed.get_rank() == 0:
        torch.save(state, out)


@pytest.mark.parametrize("names", ["flow+l2-sp+wise-ft", "lora+flow"])
def test_two_ranks_are_one_process(names, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    state = train(names, tmp_path / "one", 12)
    run_on_ranks(2, on_ranks, names, tmp_path / "two", tmp_path / "out.pt", folder=tmp_path)
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    for name, tensor in state.items():
        # A hundredth of one step: Adam makes much of gradients that are 0 but for rounding.
        assert (found[name] - tensor).abs().max() <= 1e-4, name
