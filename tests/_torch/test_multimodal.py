"""Multimodal language models are trained on texts: only their language model takes part."""

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from families import MULTIMODAL, save_family  # noqa: E402
from holdfast._torch.multimodal import freeze_other_parts, is_text_generator  # noqa: E402
from holdfast.methods._adapting import linear_layers  # noqa: E402

INPUTS = {"input_ids": torch.arange(4, 12).view(2, 4), "attention_mask": torch.ones(2, 4).long()}


@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_language_model_is_trained(family, tmp_path):
    model = transformers.AutoModelForImageTextToText.from_pretrained(save_family(family, tmp_path))
    freeze_other_parts(model)
    model(**INPUTS, labels=INPUTS["input_ids"]).loss.backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    # Several processes wait forever for the gradient of a parameter that gets none.
    assert trained == {name for name, p in model.named_parameters() if p.grad is not None}
    assert all(name.startswith(("model.language_model.", "lm_head")) for name in trained)
    assert trained > {f"{layer}.weight" for layer in linear_layers(model)}


def test_a_model_without_images_is_trained_whole(tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(save_family("Llama", tmp_path))
    freeze_other_parts(model)
    assert all(p.requires_grad for p in model.parameters())


def test_an_encoder_decoder_is_no_text_generator():
    config = transformers.T5Gemma2Config()
    assert not is_text_generator(transformers.T5Gemma2ForConditionalGeneration, config)
