import copy

import pytest
import torch
from torch import nn

from holdfast import Reference, WiseFT
from optim.problems import far, make_net

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
peft = pytest.importorskip("peft", reason="the peft extra is not installed")


def tuned_net(dtype=torch.float64):
    net = make_net(dtype)
    reference = Reference.of(net)
    with torch.no_grad():
        for p in net.parameters():
            p.add_(torch.randn_like(p))
    return net, reference


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_float64_equals_its_definition(alpha):
    net, reference = tuned_net()
    expected = {
        n: alpha * p.detach() + (1 - alpha) * reference[n] for n, p in net.named_parameters()
    }
    assert WiseFT(alpha).merge(net, reference) is net
    for n, p in net.named_parameters():
        assert torch.allclose(p, expected[n], rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_ends_are_exact(dtype):
    net, reference = tuned_net(dtype)
    end = copy.deepcopy(net)
    WiseFT(1.0).merge(net, reference)
    assert far(net, end) == 0.0
    WiseFT(0.0).merge(net, reference)
    assert far(net, make_net(dtype)) == 0.0
    assert next(net.parameters()).dtype == dtype


def test_a_new_head_stays():
    net, reference = tuned_net()
    end = copy.deepcopy(net)
    body = Reference({n: t for n, t in reference.items() if n.startswith("body")})
    WiseFT(0.0).merge(net, body)
    assert far(net.head, end.head) == 0.0
    assert far(net.body, make_net().body) == 0.0


def test_statistics():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
    reference = Reference.of(net)
    net(torch.randn(8, 1, 5, 5) + 3)
    mean = net[1].running_mean.clone()
    kept = WiseFT(0.5, statistics="keep").merge(copy.deepcopy(net), reference)
    assert torch.equal(kept[1].running_mean, mean)
    WiseFT(0.5).merge(net, reference)
    assert torch.allclose(net[1].running_mean, mean / 2)
    assert net[1].num_batches_tracked == 1  # an integer, as tuned


def small_llama(tie):
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=50, tie_word_embeddings=tie,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def test_tied_weights_move_once():
    model = small_llama(tie=True)
    reference = Reference.of(model)
    start = model.lm_head.weight.detach().clone()
    model.lm_head.weight.data += 1.0
    WiseFT(0.25).merge(model, reference)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.allclose(model.lm_head.weight, start + 0.25, atol=1e-6)


@pytest.mark.parametrize("rslora", [False, True])
def test_lora_equals_interpolating_the_merged_weights(rslora):
    base = small_llama(tie=False)
    reference = Reference.of(base)
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_rslora=rslora, lora_alpha=7)
    model = peft.get_peft_model(copy.deepcopy(base), config)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_B" in n:
                p.normal_()
    merged = copy.deepcopy(model).merge_and_unload()
    WiseFT(0.3).merge(merged, reference)
    scaled = WiseFT(0.3).merge(model, None).merge_and_unload()
    for (n, a), (_, b) in zip(merged.named_parameters(), scaled.named_parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6), n
    assert reference.distance(scaled).total > 0.1


def test_dora_is_refused():
    config = peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True)
    model = peft.get_peft_model(small_llama(tie=False), config)
    with pytest.raises(ValueError, match="uses DoRA"):
        WiseFT().merge(model, None)


def test_a_sweep_leaves_the_model_as_tuned():
    net, reference = tuned_net()
    end = copy.deepcopy(net)
    points = WiseFT().sweep(net, reference, [0.0, 0.25, 1.0], lambda m: reference.distance(m).total)
    total = reference.distance(end).total
    assert points == pytest.approx({0.0: 0.0, 0.25: total / 4, 1.0: total})
    assert far(net, end) == 0.0
    with pytest.raises(RuntimeError, match="evaluation"):
        WiseFT().sweep(
            net, reference, [0.5], lambda m: (_ for _ in ()).throw(RuntimeError("evaluation"))
        )
    assert far(net, end) == 0.0


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), "half"])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="alpha must"):
        WiseFT(bad)
    net, reference = tuned_net()
    with pytest.raises((ValueError, TypeError), match="alpha must"):
        WiseFT().sweep(net, reference, [0.5, bad], lambda m: None)
    with pytest.raises(ValueError, match="pass the Reference"):
        WiseFT().merge(net, None)
    with pytest.raises(ValueError, match="no parameter has an anchor"):
        WiseFT().merge(net, Reference({"foreign": torch.zeros(1)}))
    with pytest.raises(ValueError, match="statistics must be"):
        WiseFT(statistics="drop")
