import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from holdfast._torch import slices as slicing
from holdfast.evaluate.drift import drift, square_sum
from holdfast.kernels import compiled, distance_cpu

SHAPES = {
    "lm_head.weight": (11, 4),
    "model.embed_tokens.weight": (11, 4),
    "model.layers.10.mlp.weight": (5, 4),
    "model.layers.2.mlp.weight": (5, 4),
    "model.layers.2.self_attn.q_proj.weight": (4, 4),
    "model.norm.weight": (4,),
}


def weights(dtype=torch.float32, scale=1.0):
    return {name: (scale * torch.randn(shape)).to(dtype) for name, shape in SHAPES.items()}


def saved(directory, tensors, config=None):
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("of_base", DTYPES, ids=str)
@pytest.mark.parametrize("of_tuned", DTYPES, ids=str)
@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
def test_distances_of_files(tmp_path, monkeypatch, threads, of_base, of_tuned, many):
    monkeypatch.setattr(slicing, "SLICE", 7)
    monkeypatch.setattr("holdfast.evaluate.drift._MANY", 0 if many else 1 << 40)
    by_kernel, square_sums = [], distance_cpu.square_sums

    def watched(*given):
        by_kernel.append(square_sums(*given))
        return by_kernel[-1]

    monkeypatch.setattr(distance_cpu, "square_sums", watched)
    base, tuned = weights(of_base), weights(of_tuned)
    found = drift(saved(tmp_path / "base", base), saved(tmp_path / "tuned", tuned))
    expected = {n: (tuned[n].double() - base[n].double()).norm().item() for n in base}
    for row in found.tensors:
        assert row.distance == pytest.approx(expected[row.name], rel=1e-6)
        assert row.norm == pytest.approx(base[row.name].double().norm().item(), rel=1e-6)
        assert row.size == base[row.name].numel()
    assert found.total.distance == pytest.approx(math.hypot(*expected.values()), rel=1e-6)
    assert found.total.size == sum(t.numel() for t in base.values())
    takes = {of_base, of_tuned} <= {torch.float32, torch.bfloat16} and compiled.library(
        "distance_cpu"
    )
    assert any(by_kernel) == bool(many and takes)
    for rows in (found.layers, found.kinds):
        assert math.hypot(*(r.distance for r in rows)) == pytest.approx(found.total.distance)
        assert sum(r.size for r in rows) == found.total.size


def test_known_noise(tmp_path):
    """Noise of deviation σ on n weights moves them by σ√n."""
    n, sigma = 2_000_000, 1e-3
    base = torch.randn(n)
    tuned = base + sigma * torch.randn(n)
    save_file({"w": base}, tmp_path / "base.safetensors")
    save_file({"w": tuned}, tmp_path / "tuned.safetensors")
    found = drift(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors").total
    assert found.distance == pytest.approx(sigma * math.sqrt(n), rel=5e-3)
    assert found.distance == pytest.approx((tuned - base).double().norm().item(), rel=1e-6)
    assert found.relative == pytest.approx(found.distance / base.double().norm().item(), rel=1e-6)


@given(st.integers(0, 9000), st.floats(-150, 150), st.integers(0, 2**32))
def test_square_sum(n, exponent, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    x = (x * 2.0 ** min(exponent, 120)).float()
    assert square_sum(x) == pytest.approx(x.double().square().sum().item(), rel=1e-6, abs=0)


def test_no_drift_is_exactly_zero(tmp_path):
    base = saved(tmp_path / "base", weights(torch.bfloat16))
    found = drift(base, base)
    assert found.total.distance == 0
    assert all(row.distance == 0 for row in (*found.layers, *found.kinds, *found.tensors))


def test_layers_and_kinds_in_order(tmp_path):
    found = drift(saved(tmp_path / "base", weights()), saved(tmp_path / "tuned", weights()))
    layers = ["model.embed_tokens", "model.layers.2", "model.layers.10", "model.norm", "lm_head"]
    assert [row.name for row in found.layers] == layers
    assert [row.name for row in found.kinds] == [
        "model.embed_tokens.weight",
        "mlp.weight",
        "self_attn.q_proj.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    for row in found.tensors:
        assert row.layer in layers
        assert row.name.endswith(row.kind)


@pytest.mark.parametrize(
    ("names", "order"),
    [
        (
            ["pooler.weight", "encoder.layer.0.x.weight", "classifier.weight", "embeddings.weight"],
            ["embeddings", "encoder.layer.0", "pooler", "classifier"],
        ),
        (
            ["decoder.block.0.q", "encoder.block.1.q", "shared.weight", "decoder.norm.weight"],
            ["shared", "encoder.block.1", "decoder.block.0", "decoder.norm"],
        ),
        (
            ["fc.weight", "layer1.0.conv1.weight", "layer2.0.conv1.weight", "conv1.weight"],
            ["conv1", "layer1.0", "layer2.0", "fc"],
        ),
    ],
    ids=["bert", "t5", "resnet"],
)
def test_order_of_other_models(tmp_path, names, order):
    base = saved(tmp_path / "base", {name: torch.ones(2) for name in names})
    assert [row.name for row in drift(base, base).layers] == order


def test_prefixes_and_a_new_head(tmp_path):
    body = {"encoder.layer.0.weight": torch.ones(3, 3), "encoder.layer.1.weight": torch.ones(3, 3)}
    base = saved(tmp_path / "base", {**body, "pooler.weight": torch.ones(2)})
    tuned = {f"bert.{name}": t + 1 for name, t in body.items()} | {"classifier.bias": torch.ones(2)}
    found = drift(base, saved(tmp_path / "tuned", tuned))
    assert found.total.distance == pytest.approx(math.sqrt(18))
    assert [row.name for row in found.layers] == ["bert.encoder.layer.0", "bert.encoder.layer.1"]
    assert found.only_base == ("pooler.weight",)
    assert found.only_tuned == ("classifier.bias",)


def test_a_resized_head_is_told(tmp_path):
    tuned = weights() | {"lm_head.weight": torch.ones(13, 4)}  # but not its embedding
    found = drift(saved(tmp_path / "base", weights()), saved(tmp_path / "tuned", tuned))
    assert found.only_tuned == ("lm_head.weight (11×4 → 13×4)",)
    assert "lm_head.weight" not in {row.name for row in found.tensors}


def test_different_architectures(tmp_path):
    base = saved(tmp_path / "base", weights())
    other = saved(tmp_path / "other", {"h.0.weight": torch.ones(2), "h.1.weight": torch.ones(2)})
    with pytest.raises(ValueError, match=r"different architectures.*share no tensor name.*h\.0"):
        drift(base, other)
    wider = {name: torch.ones([2 * n for n in shape]) for name, shape in SHAPES.items()}
    with pytest.raises(ValueError, match="6 of 6 shared tensors differ in shape: lm_head"):
        drift(base, saved(tmp_path / "wider", wider))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_not_finite(tmp_path, bad):
    base, tuned = weights(), weights()
    tuned["model.norm.weight"][2] = bad
    base["lm_head.weight"][0, 0] = bad
    found = drift(saved(tmp_path / "base", base), saved(tmp_path / "tuned", tuned))
    assert set(found.not_finite) == {"model.norm.weight", "lm_head.weight"}
    assert found.base_not_finite == ("lm_head.weight",)
    rows = {row.name: row for row in found.tensors}
    assert rows["model.norm.weight"].distance == rows["lm_head.weight"].distance == 0
    assert rows["model.norm.weight"].norm == pytest.approx(base["model.norm.weight"].norm().item())
    assert math.isfinite(found.total.distance)
    assert found.total.distance > 0


def test_integers_do_not_count(tmp_path):
    base, tuned = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    tuned.num_batches_tracked += 1000
    assert drift(base, tuned).total.distance == 0
    codes = torch.ones(9, dtype=torch.uint8)
    packed = saved(tmp_path / "packed", {"fc.weight": codes, "s": torch.ones(1)})
    with pytest.raises(ValueError, match=r"1 quantized tensors \(uint8\).*: fc.weight"):
        drift(packed, packed)


def test_a_live_model_is_left_alone():
    base, tuned = nn.Linear(3, 2), nn.Linear(3, 2)
    before = {name: t.clone() for name, t in tuned.state_dict().items()}
    assert drift(base, tuned).total.distance > 0
    assert all(torch.equal(t, before[name]) for name, t in tuned.state_dict().items())


class TestTied:
    """lm_head and the embedding: one tensor, under one or two names."""

    def without_head(self):
        tensors = weights()
        del tensors["lm_head.weight"]
        return tensors

    def test_stored_twice_on_one_side(self, tmp_path):
        base = self.without_head()
        tuned = {name: t + 1 for name, t in base.items()}
        twice = tuned | {"lm_head.weight": tuned["model.embed_tokens.weight"].clone()}
        expected = drift(saved(tmp_path / "base", base), saved(tmp_path / "tuned", tuned))
        assert drift(tmp_path / "base", saved(tmp_path / "twice", twice)) == expected
        assert expected.only_base == expected.only_tuned == ()
        back = drift(tmp_path / "twice", tmp_path / "base")
        assert (back.only_base, back.only_tuned) == ((), ())
        assert back.total.distance == expected.total.distance

    def test_stored_twice_on_both(self, tmp_path):
        tensors = self.without_head()
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        moved = {name: t + 1 for name, t in tensors.items()}
        found = drift(saved(tmp_path / "base", tensors), saved(tmp_path / "tuned", moved))
        assert "lm_head.weight" not in {row.name for row in found.tensors}

    def test_untied_by_tuning(self, tmp_path):
        base, tuned = self.without_head(), weights()
        config = {"tie_word_embeddings": True}
        found = drift(saved(tmp_path / "base", base, config), saved(tmp_path / "tuned", tuned))
        row = {row.name: row for row in found.tensors}["lm_head.weight"]
        moved = tuned["lm_head.weight"] - base["model.embed_tokens.weight"]
        assert row.distance == pytest.approx(moved.norm().item())
        assert found.only_tuned == ()
        back = drift(tmp_path / "tuned", tmp_path / "base")
        assert {r.name: r for r in back.tensors}["lm_head.weight"].distance == row.distance

    def test_a_new_head_is_new(self, tmp_path):
        base = saved(tmp_path / "base", self.without_head(), {"tie_word_embeddings": False})
        found = drift(base, saved(tmp_path / "tuned", weights()))
        assert found.only_tuned == ("lm_head.weight",)
