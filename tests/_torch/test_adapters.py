"""What holdfast knows about PEFT's modules, on real ones."""

import pytest
import torch

peft = pytest.importorskip("peft", reason="the peft extra is not installed")

from holdfast._torch.adapters import adapters_are_new  # noqa: E402
from small import make_llama  # noqa: E402

CONFIGS = {
    "layers": {"target_modules": ["q_proj"]},
    "embedding": {"target_modules": ["embed_tokens"]},
    "copy": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
TRAINED = {"layers": "lora_B", "embedding": "lora_embedding_A", "copy": "modules_to_save"}


@pytest.mark.parametrize("kind", CONFIGS)
def test_new_adapters_and_trained_ones(kind):
    model = peft.get_peft_model(make_llama(), peft.LoraConfig(**CONFIGS[kind]))
    assert adapters_are_new(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if f".{TRAINED[kind]}." in name:
                p[0] += 1
    assert not adapters_are_new(model)
