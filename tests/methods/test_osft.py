"""OSFT: what is trained is orthogonal to what is kept, with every optimizer and in every dtype."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from golden import osft as golden
from holdfast import (
    EWC,
    L2SP,
    OSFT,
    AdamWUpdate,
    Distill,
    RecAdamUpdate,
    Recipe,
    Run,
    WiseFT,
    finetune_loop,
)
from holdfast.methods.osft import Subspace
from methods.stand_ins import bert, gpt2, llama

ROWS = [[i % 19 + 1 for i in range(n, n + 8)] for n in range(24)]
DATA = [{"input_ids": row, "labels": row} for row in ROWS]


def matrix(seed, shape=(6, 4)):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def frozen_share(before, after, kept):
    """The largest share of the change of a matrix that lies in frozen directions, either side."""
    change = after.double() - before.double()
    u, _, vt = torch.linalg.svd(before.double(), full_matrices=False)
    k = min(round(kept * min(before.shape)), min(before.shape) - 1)
    if k == 0:
        return 0.0
    left, right = u[:, :k].T @ change, change @ vt[:k].T
    return float(max(left.norm(), right.norm()) / change.norm())


@given(
    seed=st.integers(0, 999),
    kept=st.floats(0, 0.99),
    shape=st.sampled_from([(6, 4), (4, 6), (5, 5), (1, 3)]),
)
def test_the_projections_are_the_equations(seed, kept, shape):
    weight, change = matrix(seed, shape), matrix(seed + 1000, shape)
    subspace, pairs = Subspace.of(weight, kept), golden.directions(weight, kept)
    expected = golden.orthogonal(change, pairs)
    assert torch.allclose(subspace.project(change), expected, atol=1e-9)
    assert torch.allclose(subspace.restore(weight + change), weight + expected, atol=1e-9)
    assert torch.allclose(subspace.restore(weight), weight, atol=1e-12)


def test_training_is_the_twins():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7, bias=False), nn.Tanh(), nn.Linear(7, 3, bias=False))
    model.double()
    x, y = torch.randn(32, 5).double(), torch.randint(0, 3, (32,))
    twin = copy.deepcopy(model)
    pretrained = [p.detach().clone() for p in model.parameters()]
    run = Run(Recipe(trainable=OSFT(0.6)), model, lr=0.05, task="classification", progress=False)
    optimizer, states = run.make_optimizer(total_updates=6), [{}, {}]
    for update in range(6):
        run.advance(update + 1)
        for net in (model, twin):
            net.zero_grad()
            nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        with torch.no_grad():
            rows = zip(twin.parameters(), pretrained, states, (0.6, 0.0), strict=True)
            for p, star, state, kept in rows:  # the head is free
                p.copy_(golden.adam(p, star, p.grad, state, kept, lr=0.05))
    for p, q in zip(run.finish().parameters(), twin.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-10)
    assert not any("holdfast" in name for name in vars(model))


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.parametrize(
    "more",
    [
        {"update": AdamWUpdate(weight_decay=0.1)},
        {"update": RecAdamUpdate(), "merging": WiseFT(0.7)},
        {"penalties": (EWC(strength=10.0), L2SP(0.1)), "recall": Distill(strength=0.5)},
    ],
    ids=["adamw", "recadam+wise-ft", "ewc+l2-sp+distill"],
)
def test_the_change_is_orthogonal_to_what_is_kept(make, more):
    torch.manual_seed(0)
    model = make()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    tuned = finetune_loop(
        model, Recipe(trainable=OSFT(0.5), **more), DATA, lr=1e-3, epochs=2, progress=False,
    )  # fmt: skip
    after = {name: p.detach() for name, p in tuned.named_parameters()}
    linear = [
        f"{name}.weight"
        for name, m in model.named_modules()
        if (isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D") and name != "lm_head"
    ]
    for name in linear:
        assert not torch.equal(before[name], after[name])
        assert frozen_share(before[name], after[name], 0.5) < 1e-3, name
    others = [name for name in after if name not in linear and "lm_head" not in name]
    assert any(not torch.equal(before[name], after[name]) for name in others)


def test_in_bfloat16_only_rounding_leaves_the_subspace():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)).bfloat16()
    before = model[0].weight.detach().clone()
    data = torch.utils.data.TensorDataset(torch.randn(64, 32).bfloat16(), torch.arange(64) % 4)
    finetune_loop(
        model, Recipe(trainable=OSFT(0.5)), data, lr=1e-2, epochs=5, task="classification",
        progress=False,
    )  # fmt: skip
    assert model[0].weight.dtype == torch.bfloat16
    assert frozen_share(before, model[0].weight.detach(), 0.5) < 0.02


def test_every_matrix_can_change_and_the_head_is_free():
    for kept in (0.75, 0.99):
        wide = matrix(0, (2, 8))
        assert len(Subspace.of(wide, kept).s) == 1
        assert Subspace.of(wide, kept).project(matrix(1, (2, 8))).norm() > 0.1
    model = bert()
    Run(Recipe(trainable=OSFT()), model, lr=0.1, task="classification", progress=False)
    found = vars(model)["_holdfast_subspaces"]
    assert "bert.encoder.layer.1.output.dense.weight" in found
    assert not any(name.startswith("classifier") for name in found)


def test_new_parts_and_frozen_layers_are_not_projected():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    run = Run(
        Recipe(trainable=OSFT()), model, lr=0.1, task="classification", new="2", progress=False
    )
    assert list(vars(model)["_holdfast_subspaces"]) == ["1.weight"]
    assert copy.deepcopy(model)._holdfast_subspaces is model._holdfast_subspaces
    assert run.finish() is model


def test_what_it_cannot_train():
    with pytest.raises(ValueError, match=r"kept must be in \[0, 1\)"):
        OSFT(kept=1.0)
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    model = peft.get_peft_model(llama(), peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match="frozen under adapters: merge the adapters first"):
        Run(Recipe(trainable=OSFT()), model, lr=0.1, task="causal_lm", progress=False)


def test_a_host_that_flattens_a_matrix_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    run = Run(Recipe(trainable=OSFT()), model, lr=0.1, task="classification", progress=False)
    optimizer = run.make_optimizer(total_updates=2)
    model[0].weight = nn.Parameter(torch.zeros(16))
    with pytest.raises(ValueError, match="changed it or its shape"):
        optimizer.step()
