import copy

import pytest
import torch
from torch import nn

from golden.lines import lines
from holdfast import LiNeS, Recipe, Reference, Run
from holdfast._torch.layers import block_of, depth_of
from methods.merges import assert_equals

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")


def tuned_llama(blocks=3):
    config = transformers.LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=blocks, num_attention_heads=2,
        vocab_size=11,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    reference = Reference.of(model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p))
    return model, reference


def test_float64_equals_its_definition():
    model, reference = tuned_llama()
    tuned = copy.deepcopy(model).state_dict()
    LiNeS(alpha=0.2, beta=0.7).merge(model, reference)
    for name, p in model.named_parameters():
        block = int(name.split(".")[2]) + 1 if ".layers." in name else None
        flat = reference[name].flatten().tolist(), tuned[name].flatten().tolist()
        assert_equals(p.detach().flatten(), lines(*flat, block, 3, 0.2, 0.7))


def test_what_is_outside_of_the_blocks_keeps_alpha():
    model, reference = tuned_llama()
    LiNeS(alpha=0.0, beta=1.0).merge(model, reference)
    moved = reference.distance(model).per_parameter
    for name in ("lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"):
        assert moved[name] == 0
    assert all(d == 0 for name, d in moved.items() if ".layers.0." in name)
    assert all(d > 0 for name, d in moved.items() if ".layers.2." in name)


@pytest.mark.parametrize("settings", [(0.0, 1.0), (0.3, 0.7), (0.5, 1.0)])
def test_the_last_block(settings):
    model, reference = tuned_llama()
    end = copy.deepcopy(model)
    LiNeS(*settings).merge(model, reference)
    weight, tuned = (m.model.layers[2].mlp.up_proj.weight for m in (model, end))
    base = reference["model.layers.2.mlp.up_proj.weight"]
    assert torch.equal(weight, tuned) == (sum(settings) == 1)
    assert torch.allclose(weight - base, sum(settings) * (tuned - base))


def test_blocks_are_counted_by_their_number():
    names = [f"h.{i}.weight" for i in sorted(range(12), key=str)]  # as files sort them
    assert depth_of(names)["h.10.weight"] == 10 / 11
    apart = depth_of(["decoder.0.w", "decoder.1.w", "encoder.0.w", "encoder.1.w", "encoder.2.w"])
    assert list(apart.values()) == [0, 1, 0, 0.5, 1]
    stages = ["layer1.0.w", "layer1.1.w", "layer2.0.w", "layer2.1.down.0.w", "layer2.1.down.1.w"]
    assert list(depth_of(stages).values()) == [0, 1 / 3, 2 / 3, 1, 1]
    assert depth_of(["head.0.w", "norm.w", "x0.w"]) == dict.fromkeys(["head.0.w", "norm.w", "x0.w"])


@pytest.mark.parametrize(
    "config",
    [
        transformers.BertConfig, transformers.GPT2Config, transformers.LlamaConfig,
        transformers.ViTConfig, transformers.ResNetConfig,
    ],
)  # fmt: skip
def test_names_tell_the_blocks_that_the_modules_have(config):
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config())
    blocks = block_of(model)
    depths = depth_of(blocks)
    assert [d is None for d in depths.values()] == [b is None for b in blocks.values()]
    of_block = {block: depths[name] for name, block in blocks.items() if block is not None}
    order = list(of_block.values())  # in the order of definition
    assert order == sorted(order)
    assert (order[0], order[-1]) == (0, 1)


def test_a_model_without_blocks_is_refused_before_training():
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match=r"no tensor's name has a number, such as layers\.0"):
        Run(Recipe(merging=LiNeS()), model, [], lr=0.1, task="classification", progress=False)
    with pytest.raises(ValueError, match="use beta=0"):
        LiNeS().merge(model, Reference.of(model))
    LiNeS(alpha=0.5, beta=0.0).merge(model, Reference.of(model))


def test_lora_scales_b_of_each_block():
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    base, _ = tuned_llama()
    reference = Reference.of(base)
    config = peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    merged = LiNeS(0.2, 0.6).merge(copy.deepcopy(model).merge_and_unload(), reference)
    scaled = LiNeS(0.2, 0.6).merge(model, None).merge_and_unload()
    for (name, p), q in zip(merged.named_parameters(), scaled.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-6), name


@pytest.mark.parametrize("bad", [{"alpha": -0.1}, {"beta": float("inf")}, {"beta": "x"}])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="must be"):
        LiNeS(**bad)
