"""The memory of a finished run is freed at once, not at the next garbage collection."""

import gc
import weakref

import pytest
import torch

from holdfast import LoopSettings, Run, train_loop


@pytest.mark.parametrize("recipe", ["standard", "recadam", "flow", "distill", "wise-ft"])
def test_a_finished_run_is_freed(recipe):
    data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.arange(8) % 2)

    def train():
        run = Run(
            recipe, torch.nn.Linear(4, 2), data, lr=1e-3, task="classification", cache=False,
            progress=False,
        )  # fmt: skip
        train_loop(run, settings=LoopSettings(max_updates=2))
        run.finish()
        return [weakref.ref(x) for x in (run, run.optimizer, run.model, run.criterion)]

    train()  # the first step imports modules, whose errors hold frames
    gc.collect()
    gc.disable()
    try:
        assert [left() for left in train()] == [None] * 4
    finally:
        gc.enable()
