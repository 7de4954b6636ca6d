"""Tiny pretrained models in folders, of every kind that is fine-tuned."""

import pytest
import torch
import transformers

from small import make_llama, make_tokenizer

BERT = {
    "vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 32,
}  # fmt: skip
COLOURS = {"red": (200, 20, 20), "green": (20, 200, 20), "blue": (20, 20, 200)}


def save_bert(folder, cls=transformers.BertModel, **more):
    torch.manual_seed(0)
    cls(transformers.BertConfig(**{**BERT, **more})).save_pretrained(folder)
    make_tokenizer(cls_token="[CLS]", sep_token="[SEP]").save_pretrained(folder)
    return str(folder)


def save_llama(folder):
    make_llama(scale=0.02).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def save_vit(folder, cls=transformers.ViTForImageClassification, **more):
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, **more,
    )  # fmt: skip
    cls(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(folder)
    return str(folder)


def save_resnet(folder):
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic"
    )
    transformers.ResNetForImageClassification(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    return str(folder)


def save_images(folder, n=4, classes=tuple(COLOURS)):
    """Single colours, a folder each."""
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(n):
            colour = tuple(c + 3 * i for c in COLOURS[name])
            image.new("RGB", (20, 24), colour).save(folder / name / f"{i}.png")
    return str(folder)
