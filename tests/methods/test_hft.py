import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.methods.gradual_unfreezing import GradualUnfreezing
from holdfast.methods.hft import HFT, draw_frozen, matrices
from methods.stand_ins import ResNet, bert, free, gpt2, llama, make_run, same, state
from ranks import run_on_ranks

#: How many of each category there are in a layer.
KINDS = {
    "bert": (bert, {"attention": 4, "feed-forward": 2, "norm": 2}),
    "llama": (llama, {"attention": 4, "feed-forward": 3, "norm": 2}),
    "gpt2": (gpt2, {"attention": 2, "feed-forward": 2, "norm": 2}),
}


def frozen_modules(model, groups):
    names = {m for members in groups.values() for m in members}
    return {
        m for m in names if not any(p.requires_grad for p in model.get_submodule(m).parameters())
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [2, 3])
def test_half_of_each_category(kind, layers):
    make, counts = KINDS[kind]
    model = make(layers)
    groups = matrices(model)
    expected = {(c, layer): n for c, n in counts.items() for layer in range(layers)}
    assert {key: len(names) for key, names in groups.items()} == expected
    method = HFT()
    assert method.prepare(make_run(model)) is model
    method.advance(model, 1, 10)
    frozen = frozen_modules(model, groups)
    for category, count in counts.items():
        per_layer = [
            sum(name in frozen for name in groups[category, layer]) for layer in range(layers)
        ]
        assert all(n in (count // 2, (count + 1) // 2) for n in per_layer)
        assert sum(per_layer) in (count * layers // 2, math.ceil(count * layers / 2))
        if count % 2:
            assert all(a != b for a, b in itertools.pairwise(per_layer))
    # A module is frozen as a whole, and nothing else is.
    for name, p in model.named_parameters():
        assert p.requires_grad == (name.rpartition(".")[0] not in frozen)
    method.finish(model)
    assert len(free(model)) == len(list(model.parameters()))


def test_convolutions_and_norms_of_a_resnet():
    model = ResNet()
    groups = matrices(model, keep=("fc",))
    assert {key: len(names) for key, names in groups.items()} == {
        (category, layer): 2 for category in ("convolution", "norm") for layer in range(4)
    }
    HFT().prepare(make_run(model))
    frozen = frozen_modules(model, groups)
    assert all(sum(name in frozen for name in names) == 1 for names in groups.values())
    assert {"conv1.weight", "conv1.bias", "fc.weight", "fc.bias"} <= free(model)


def test_what_is_never_frozen():
    model = bert(2)
    HFT(frozen=1.0).prepare(make_run(model))
    assert not any(".layer." in name for name in free(model))
    outside = {n.split(".layer.")[0].split(".")[0] for n in free(model)}
    assert outside == {"bert", "classifier"}
    assert "bert.embeddings.word_embeddings.weight" in free(model)

    net = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2))
    HFT(frozen=1.0).prepare(make_run(net, new=("1",)))
    assert free(net) == {"0.weight", "1.weight", "1.bias", "3.weight", "3.bias"}


def test_multihead_attention_is_two_matrices():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    groups = matrices(model)
    assert groups["attention", 0] == ["layers.0.self_attn", "layers.0.self_attn.out_proj"]
    HFT().prepare(make_run(model))
    attention = model.layers[0].self_attn
    frozen = [
        not attention.in_proj_weight.requires_grad,
        not attention.out_proj.weight.requires_grad,
    ]
    assert sorted(frozen) == [False, True]


def test_rounds_draw_anew_and_only_depend_on_the_update():
    total, rounds = 9, 3
    method = HFT(rounds=rounds)
    model = llama(4)
    before = free(model)
    method.prepare(make_run(model, seed=5))
    always = before - free(model)
    seen = []
    for update in range(1, total + 1):
        method.advance(model, update, total)
        seen.append(frozenset(free(model)))
    assert seen == [seen[0]] * 3 + [seen[3]] * 3 + [seen[6]] * 3
    assert len(set(seen)) == rounds
    # Before the first update all that will ever be free requires gradients, and no more.
    assert before - always == frozenset.union(*seen)
    for update in (9, 1, 5):  # a run that goes on after a stop
        again = llama(4)
        method.prepare(make_run(again, seed=5))
        method.advance(again, update, total)
        assert free(again) == seen[update - 1]


def test_seeds():
    def drawn(method, seed):
        model = llama(4)
        method.prepare(make_run(model, seed=seed))
        return free(model)

    assert drawn(HFT(), 1) == drawn(HFT(), 1)
    assert drawn(HFT(), 1) != drawn(HFT(), 2)
    assert drawn(HFT(seed=1), 2) == drawn(HFT(), 1)
    torch.manual_seed(3)
    first = torch.get_rng_state()
    drawn(HFT(), 1)
    model = llama(4)
    now = torch.get_rng_state()
    HFT().prepare(make_run(model))
    assert torch.equal(torch.get_rng_state(), now)
    assert not torch.equal(first, now)  # the models drew, not the method


def test_frozen_matrices_do_not_move_even_with_momentum():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
    method = HFT(rounds=2)
    method.prepare(make_run(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    for update in range(1, 7):
        method.advance(model, update, 6)
        before, may = state(model), free(model)
        model(torch.randn(8, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
        assert changed == may


def test_the_plan_travels_with_copies():
    model = bert(2)
    method = HFT(rounds=2, seed=1)
    method.prepare(make_run(model))
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    method.advance(model, 2, 2)
    for other in copies:
        method.advance(other, 2, 2)
        assert free(other) == free(model)


def test_what_a_user_froze_stays_frozen():
    model = bert(2)
    model.bert.encoder.layer[0].requires_grad_(False)
    groups = matrices(model)
    assert {layer for _, layer in groups} == {0}
    method = HFT()
    method.prepare(make_run(model))
    method.advance(model, 1, 1)
    method.finish(model)
    assert not any(".layer.0." in name for name in free(model))
    assert any(".layer.1." in name for name in free(model))


def test_neutral():
    model = bert(2)
    before = state(model)
    method = HFT(**HFT.neutral)
    method.prepare(make_run(model))
    method.advance(model, 1, 3)
    assert len(free(model)) == len(list(model.parameters()))
    assert same(before, state(model))


@given(
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**31),
)
def test_the_draw(counts, fraction, seed):
    groups = {("a", i): [f"{i}.{j}" for j in range(n)] for i, n in enumerate(counts)}
    drawn = draw_frozen(groups, fraction, torch.Generator().manual_seed(seed))
    for i, n in enumerate(counts):
        count = sum(name in drawn for name in groups["a", i])
        assert math.floor(fraction * n) <= count <= math.ceil(fraction * n)
        above = sum(counts[: i + 1])
        count = sum(name in drawn for j in range(i + 1) for name in groups["a", j])
        assert abs(count - fraction * above) < 1 + 1e-9


def test_each_matrix_is_as_likely_as_another():
    groups = {("a", layer): [f"{layer}.{j}" for j in range(3)] for layer in range(3)}
    generator = torch.Generator().manual_seed(0)
    counts = dict.fromkeys((name for names in groups.values() for name in names), 0)
    for _ in range(2000):
        for name in draw_frozen(groups, 0.5, generator):
            counts[name] += 1
    assert all(900 < count < 1100 for count in counts.values())


def test_bad_input():
    with pytest.raises(ValueError, match=r"frozen must be in \[0, 1\]"):
        HFT(frozen=1.5)
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        HFT(rounds=0)
    with pytest.raises(TypeError, match="rounds must be a whole number"):
        HFT(rounds=1.5)
    with pytest.raises(TypeError, match="seed must be a whole number"):
        HFT(seed="a")
    with pytest.raises(ValueError, match="no matrices to freeze"):
        HFT().prepare(make_run(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="was not prepared"):
        HFT().advance(bert(), 1, 1)


def train_on_ranks():
    """What is frozen stays, the ranks stay alike; DDP finds out what is frozen by itself."""
    for method in (HFT(rounds=3), GradualUnfreezing(until=0.7)):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
        method.prepare(make_run(model))
        wrapped = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for update in range(1, 10):
            method.advance(model, update, 9)
            before, may = state(model), free(model)
            x = torch.randn(3, 4) + torch.distributed.get_rank()
            wrapped(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = {n for n, t in state(model).items() if not torch.equal(t, before[n])}
            assert changed == may, (method, update)
        for tensor in state(model).values():
            first = tensor.clone()
            torch.distributed.broadcast(first, 0)
            assert torch.equal(first, tensor)


@pytest.mark.soak
def test_data_parallel(tmp_path):
    run_on_ranks(2, train_on_ranks, folder=tmp_path)
