"""The Trainer's mixed precision on a GPU, where float16 brings its GradScaler."""

import pytest
import torch

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("datasets", reason="the hf extra is not installed")

from test_hf import assert_same_bits, make_model, make_trainer

from holdfast import Recipe, Reference
from holdfast._torch.adapters import unwrapped

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
RECIPE = "flow+recadam+l2-sp"


def train(folder, options, resume=None, recipe=RECIPE, model=None):
    options = {
        "use_cpu": False, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2,
        "learning_rate": 1e-3, "num_train_epochs": 10, "max_grad_norm": 1.0, **options,
    }  # fmt: skip
    model = make_model(torch.float32) if model is None else model
    trainer = make_trainer(Recipe.preset(recipe), folder, model, options=options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("options", "tolerance"),
    [({"fp16": True}, 0.05), ({"bf16": True}, 0.3), ({"torch_compile": True}, 0.01)],
)
def test_mixed_precision_is_near_float32(tmp_path, options, tolerance):
    """Against how far training has moved the weights."""
    torch.backends.cuda.matmul.allow_tf32 = False
    base = Reference.of(make_model(torch.float32).cuda())
    plain = Reference.of(train(tmp_path / "plain", {}).model)
    mixed = unwrapped(train(tmp_path / "mixed", options).model)
    assert plain.distance(mixed).total < tolerance * base.distance(mixed).total


def test_float16_resumes_to_the_bit(tmp_path):
    options = {"fp16": True, "save_strategy": "steps", "save_steps": 7}
    whole = train(tmp_path / "whole", options)
    again = train(tmp_path / "again", options, str(tmp_path / "whole" / "checkpoint-7"))
    assert_same_bits(again.model, whole.model)


def test_a_step_that_the_scaler_skips_does_not_count(tmp_path):
    calls = []

    def overflow(gradient):
        """Infinite in one micro-batch of the second update."""
        calls.append(1)
        return gradient * float("inf") if len(calls) == 3 else gradient

    model = make_model(torch.float32)
    model.classifier.weight.register_hook(overflow)
    trainer = train(tmp_path, {"fp16": True}, recipe="recadam", model=model)
    assert all(torch.isfinite(p).all() for p in trainer.model.parameters())
    assert trainer.state.global_step == 20
    steps = {int(state["step"]) for state in trainer.run.optimizer.state.values()}
    assert steps == {19}
    assert trainer.run.optimizer.recall_state()["updates"] == 19
