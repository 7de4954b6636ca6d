import copy

import pytest
import torch
from torch import nn

from holdfast import Reference, Run, WiseFT
from holdfast.hosts.raw import train_loop
from methods.problems import far, make_net

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


def test_a_run_is_finished_once():
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.arange(8) % 2)
    run = Run("wise-ft", model, data, lr=0.1, task="classification", progress=False)
    train_loop(run)
    once = {name: tensor.clone() for name, tensor in run.finish().state_dict().items()}
    assert all(
        torch.equal(once[name], tensor) for name, tensor in run.finish().state_dict().items()
    )
    other = {name: tensor + 1 for name, tensor in once.items()}
    run.model.load_state_dict(other)  # those of a checkpoint, for example
    assert not any(torch.equal(other[n], tensor) for n, tensor in run.finish().state_dict().items())


def test_negative_zeros_are_kept_at_the_ends():
    net = nn.Linear(2, 1, bias=False)
    net.weight.data = torch.tensor([[-0.0, 1.0]])
    reference = Reference.of(net)
    net.weight.data = torch.tensor([[1.0, -0.0]])
    WiseFT(1.0).merge(net, reference)
    assert torch.equal(net.weight.signbit(), torch.tensor([[False, True]]))
    WiseFT(0.0).merge(net, reference)
    assert torch.equal(net.weight.signbit(), torch.tensor([[True, False]]))


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


def adapted(base, **config):
    """A model with adapters that have been trained, and where they began."""
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, **config))
    zeros = {
        n: p.new_zeros(()).expand(p.shape)
        for n, p in model.named_parameters()
        if "lora_B" in n or "lora_embedding_B" in n
    }
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n or p.requires_grad:
                p.normal_()
    return model, Reference(zeros).bind(model)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_lora_through_its_anchors(alpha):
    """The Reference that the LoRA stage makes: zeros for B, nothing else. B is scaled once."""
    model, anchors = adapted(small_llama(tie=False), target_modules="all-linear")
    tuned, scaled = copy.deepcopy(model), copy.deepcopy(model)
    WiseFT(alpha).merge(model, anchors)
    WiseFT(alpha).merge(scaled, None)
    for (n, p), q, end in zip(
        model.named_parameters(), scaled.parameters(), tuned.parameters(), strict=True
    ):
        assert torch.equal(p, q), n
        assert torch.allclose(p, alpha * end if "lora_B" in n else end, rtol=1e-6), n
        if alpha == 1 or "lora_B" not in n:
            assert torch.equal(p, end)


def test_a_reference_of_the_adapters_themselves_leaves_a_alone():
    """Scaling A as well would scale the effective weights twice."""
    base = small_llama(tie=False)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear"))
    reference = Reference.of(model)
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "lora_" in n:
                p.normal_()
    end = copy.deepcopy(model)
    WiseFT(0.5).merge(model, reference)
    for (n, p), q in zip(model.named_parameters(), end.parameters(), strict=True):
        assert torch.equal(p, 0.5 * q if "lora_B" in n else q), n


def test_lora_keeps_a_new_head_and_never_touches_a_quantised_base():
    net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model, anchors = adapted(net, target_modules=["0"], modules_to_save=["2"])
    layer = model.base_model.model[0].base_layer
    packed = torch.arange(10, dtype=torch.uint8)  # as bitsandbytes keeps 4-bit weights
    layer.weight = nn.Parameter(packed.clone(), requires_grad=False)
    head = model.base_model.model[2].modules_to_save["default"].weight.detach().clone()
    WiseFT(0.0).merge(model, anchors)
    assert torch.equal(layer.weight, packed)
    assert torch.equal(model.base_model.model[2].modules_to_save["default"].weight, head)
    assert float(model.base_model.model[0].lora_B["default"].weight.detach().abs().sum()) == 0.0


def test_an_adapted_embedding():
    net = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3))
    reference = Reference.of(net)
    model, _ = adapted(net, target_modules=["0"])
    end = copy.deepcopy(model).merge_and_unload()
    half = WiseFT(0.5).merge(model, None).merge_and_unload()
    middle = (end[0].weight + reference["0.weight"]) / 2
    assert torch.allclose(half[0].weight, middle, atol=1e-6)


def test_a_recipe_with_lora_and_wise_ft():
    from holdfast.methods.lora import LoRA
    from holdfast.recipe import Recipe
    from holdfast.run import Run

    model = small_llama(tie=False)
    recipe = Recipe(trainable=LoRA(r=2), merging=WiseFT(0.25))
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}]
    run = Run(recipe, model, rows, lr=1e-3, progress=False, cache=False)
    with torch.no_grad():
        for n, p in run.model.named_parameters():
            if "lora_B" in n:
                p.fill_(1.0)
    kept = run.finish()
    values = [p for n, p in kept.named_parameters() if "lora_B" in n]
    assert all(torch.equal(p, torch.full_like(p, 0.25)) for p in values)


def test_merged_adapters_are_refused():
    model, anchors = adapted(small_llama(tie=False), target_modules="all-linear")
    model.merge_adapter()
    with pytest.raises(ValueError, match="unmerge them first"):
        WiseFT().merge(model, anchors)


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
