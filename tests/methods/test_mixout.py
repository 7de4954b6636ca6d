import copy
import io
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812

from golden import mixout as golden
from holdfast.methods.mixout import MixLinear, Mixout, mixout
from holdfast.reference import Reference
from methods.stand_ins import ResNet, bert, gpt2, llama, make_run, same, state, with_reference


def small_net():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def moved(model, by=0.3):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(by * torch.randn_like(p))
    return model


def masks(shape, p, per, seed):
    """The masks that mixout will draw with this seed: 1 where the weight is the anchor."""
    torch.manual_seed(seed)
    drawn = F.dropout(torch.ones(shape if per == "weight" else shape[1]).double(), p) == 0
    return drawn.double().expand(shape)


@given(p=st.floats(0.05, 0.95), seed=st.integers(0, 99), per=st.sampled_from(["weight", "neuron"]))
def test_it_is_the_equation(p, seed, per):
    generator = torch.Generator().manual_seed(seed)
    weight, anchor, outer = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    weight.requires_grad_()
    mask = masks(weight.shape, p, per, seed)
    torch.manual_seed(seed)
    found = mixout(weight, anchor, p, per)
    assert torch.allclose(
        found, golden.mixed(weight.detach(), anchor, mask, p), rtol=1e-12, atol=1e-12
    )
    found.backward(outer)
    assert torch.allclose(weight.grad, golden.gradient(outer, mask, p), rtol=1e-12)


@pytest.mark.parametrize("per", ["weight", "neuron"])
def test_the_expectation_is_the_weight_and_the_penalty_is_quadratic(per):
    weight, anchor, centre = torch.randn(3, 3, 4, dtype=torch.float64)
    p, n = 0.6, 20000
    draws = torch.stack([mixout(weight, anchor, p, per) for _ in range(n)])
    assert torch.allclose(draws.mean(0), weight, atol=0.1)
    loss = 0.5 * (draws - centre).square().sum((1, 2)).mean()
    expected = 0.5 * (weight - centre).square().sum()
    expected += 0.5 * p / (1 - p) * (weight - anchor).square().sum()
    assert loss.item() == pytest.approx(expected.item(), rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_at_the_anchor_nothing_changes(dtype):
    weight = torch.randn(20, 30).to(dtype)
    assert torch.equal(mixout(weight, weight.clone(), 0.9), weight)


@pytest.mark.parametrize("make", [small_net, bert, llama, gpt2])
def test_models_mix_in_training_only_and_are_put_back(make):
    model = make()
    kinds = {name: type(m) for name, m in model.named_modules()}
    names = list(model.state_dict())
    method, run = Mixout(p=0.5), with_reference(model)
    assert method.prepare(run) is model
    assert list(model.state_dict()) == names
    moved(model)
    inputs = torch.randn(2, 4) if make is small_net else torch.arange(10).view(2, 5)
    plain = copy.deepcopy(model)
    method.finish(plain)
    assert {name: type(m) for name, m in plain.named_modules()} == kinds
    assert not any(hasattr(m, "anchor") for m in plain.modules())

    def run_it(net):
        with torch.no_grad():
            out = net(inputs)
        return out if isinstance(out, torch.Tensor) else out.logits

    assert torch.equal(run_it(model.eval()), run_it(plain.eval()))
    model.train()
    torch.manual_seed(1)
    one = run_it(model)
    torch.manual_seed(1)
    assert torch.equal(one, run_it(model))
    assert not torch.equal(one, run_it(model))


def test_what_is_mixed():
    model = bert()
    run = with_reference(model, new=("classifier",))
    Mixout().prepare(run)
    mixing = {n for n, m in model.named_modules() if isinstance(m, MixLinear)}
    linear = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert linear - mixing == {"classifier"}
    query = model.bert.encoder.layer[0].attention.self.query
    name = "bert.encoder.layer.0.attention.self.query.weight"
    assert query.anchor.data_ptr() == run.reference[name].data_ptr()
    model.bfloat16().train()(torch.arange(5).view(1, 5))
    assert query.anchor.dtype == torch.bfloat16


def test_gpt2_mixes_its_own_linear_layers():
    model = gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).double()
    run = with_reference(model)
    Mixout(p=0.5, per="neuron").prepare(run)
    layer = model.transformer.h[0].mlp.c_fc
    moved(model)
    x = torch.randn(3, 32, dtype=torch.float64)
    mask = masks((128, 32), 0.5, "neuron", 7)
    torch.manual_seed(7)
    found = layer(x)
    weight = golden.mixed(layer.weight.detach().T, layer.anchor.T, mask, 0.5)
    assert torch.allclose(found, F.linear(x, weight, layer.bias))


def test_the_tied_head_has_its_anchor():
    model = llama(tie_word_embeddings=True)
    run = with_reference(model)
    Mixout().prepare(run)
    assert model.lm_head.anchor is run.reference["model.embed_tokens.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize("make", [small_net, gpt2])
def test_copies_and_pickles_mix_on(make):
    model = make()
    Mixout(p=0.5).prepare(with_reference(model))
    moved(model).train()
    inputs = torch.randn(2, 4) if make is small_net else torch.arange(10).view(2, 5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    copies = [
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
        torch.load(file, weights_only=False),
    ]
    outputs = []
    for net in [model, *copies]:
        torch.manual_seed(4)
        out = net(inputs)
        outputs.append(out if isinstance(out, torch.Tensor) else out.logits)
    assert all(torch.equal(outputs[0], out) for out in outputs)


def test_nothing_at_all_happens_at_zero():
    model = small_net()
    before = state(model)
    assert Mixout(p=0.0).prepare(with_reference(model)) is model
    assert type(model[0]) is nn.Linear
    assert same(before, state(model))
    assert Mixout(**Mixout.neutral).p == 0


def test_it_draws_toward_the_anchor():
    """Least squares with nothing to learn: mixout leads back, full fine-tuning stays away."""
    x = torch.randn(64, 4)
    ends = {}
    for p in (0.0, 0.8):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 2, bias=False))
        run = with_reference(model)
        target = run.reference["0.weight"] + 1.0
        Mixout(p=p).prepare(run)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        for _ in range(300):
            loss = (model(x) - x @ target.T).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        ends[p] = run.reference.distance(model).total
    assert ends[0.8] < 0.7 * ends[0.0]


def test_bad_input():
    with pytest.raises(ValueError, match="p must be below 1"):
        Mixout(p=1.0)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\]"):
        Mixout(p=1.5)
    with pytest.raises(TypeError, match="p must be a number"):
        Mixout(p="0.5")
    with pytest.raises(ValueError, match="per must be"):
        Mixout(per="layer")
    model = ResNet()
    with pytest.raises(ValueError, match="no linear layer"):
        Mixout().prepare(with_reference(model, new=("fc",)))
    with pytest.raises(ValueError, match="needs the pretrained weights"):
        Mixout().prepare(make_run(model))
    assert type(model.fc) is nn.Linear
    wrong = Reference({"0.weight": torch.zeros(2, 2)})
    run = with_reference(small_net())
    run.reference = wrong
    with pytest.raises(ValueError, match="anchors of the wrong shape"):
        Mixout().prepare(run)
