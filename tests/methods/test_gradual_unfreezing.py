import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from holdfast.methods.gradual_unfreezing import GradualUnfreezing, layers_free
from methods.stand_ins import ResNet, bert, free, llama, make_run


def blocks(model):
    """Which of the numbered layers are free, with "below" and "above" for what is around them."""
    found = set()
    for name in free(model):
        parts = name.split(".layer.")
        below = "embeddings" in name
        found.add(int(parts[1][0]) if len(parts) > 1 else "below" if below else "above")
    return found


def test_the_schedule_literally():
    model = bert(3)
    method = GradualUnfreezing(until=0.5)
    method.prepare(make_run(model))
    assert len(free(model)) == len(list(model.parameters()))  # all may change at some time
    expected = {
        1: {"above"}, 2: {"above"},
        3: {"above", 2}, 4: {"above", 2},
        5: {"above", 2, 1}, 6: {"above", 2, 1},
        7: {"above", 2, 1, 0}, 8: {"above", 2, 1, 0},
        9: {"above", 2, 1, 0, "below"}, 16: {"above", 2, 1, 0, "below"},
    }  # fmt: skip
    for update, layers in expected.items():
        method.advance(model, update, 16)
        assert blocks(model) == layers, update
    method.advance(model, 3, 16)  # a pure function of the update
    assert blocks(model) == expected[3]
    method.finish(model)
    assert len(free(model)) == len(list(model.parameters()))


@given(
    layers=st.integers(1, 40),
    total=st.integers(1, 400),
    until=st.floats(0, 1) | st.sampled_from([0.1, 0.3, 0.7]),
)
def test_the_schedule_in_general(layers, total, until):
    counts = [layers_free(update, total, layers, until) for update in range(1, total + 1)]
    assert counts == sorted(counts)
    assert all(1 <= n <= layers for n in counts)
    for update, n in enumerate(counts, start=1):
        if update - 1 >= until * total:
            assert n == layers
    if until * total >= layers:
        assert counts[0] == 1
        assert set(range(1, layers)) <= set(counts)  # one after the other


@pytest.mark.parametrize("until", [0.1, 0.3, 0.6, 0.7])
def test_rounding_makes_no_layer_late(until):
    assert layers_free(int(until * 10 + 0.5) * 10 + 1, 100, 11, until) == 11


def test_new_parts_are_free_wherever_they_stand():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    method = GradualUnfreezing()
    method.prepare(make_run(model, new=("0",)))
    method.advance(model, 1, 10)
    assert free(model) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_other_models():
    method = GradualUnfreezing(until=1.0)
    for model, top in ((ResNet(), {"fc.weight", "fc.bias"}), (llama(), None)):
        method.prepare(make_run(model))
        method.advance(model, 1, 8)
        assert free(model) == (top or {"model.norm.weight", "lm_head.weight"})


def test_what_a_user_froze_costs_no_time():
    model = bert(3)
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    method = GradualUnfreezing(until=0.5)
    method.prepare(make_run(model))
    seen = []
    for update in range(1, 9):
        method.advance(model, update, 8)
        seen.append(len(blocks(model)))
    assert seen == [1, 1, 2, 2, 3, 3, 3, 3]
    method.finish(model)
    assert blocks(model) == {"above", 1, 2}


def test_neutral_and_untouched():
    model = ResNet()
    GradualUnfreezing(**GradualUnfreezing.neutral).prepare(make_run(model))
    GradualUnfreezing(until=0.0).advance(model, 1, 10)
    assert len(free(model)) == len(list(model.parameters()))


def test_frozen_layers_keep_their_weights():
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(3)))
    method = GradualUnfreezing(until=1.0)
    method.prepare(make_run(model))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    first = model[0].weight.clone()
    for update in (1, 2, 3, 4):
        method.advance(model, update, 6)
        model(torch.randn(5, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model[0].weight, first)
    assert not torch.equal(model[1].weight, model[0].weight)


def test_bad_input():
    with pytest.raises(ValueError, match=r"until must be in \[0, 1\]"):
        GradualUnfreezing(until=2)
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        GradualUnfreezing().prepare(make_run(nn.Linear(2, 2).requires_grad_(False)))
    with pytest.raises(ValueError, match="Linear has one trainable layer"):
        GradualUnfreezing().prepare(make_run(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="was not prepared"):
        GradualUnfreezing().advance(nn.Linear(2, 2), 1, 1)
