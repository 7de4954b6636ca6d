import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from holdfast import Reference
from holdfast._torch.fingerprint import (
    _Digests,
    fingerprint,
    model_fingerprint,
    started_model_fingerprint,
    tensor_fingerprints,
)
from methods.problems import make_net


@pytest.fixture
def net():
    return make_net(torch.float32)


def write_sharded(tensors, folder):
    """As Hugging Face writes it: shards and an index."""
    names = sorted(tensors)
    weight_map = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, folder / file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_of_is_a_copy(net):
    reference = Reference.of(net)
    before = {n: p.detach().clone() for n, p in net.named_parameters()}
    with torch.no_grad():
        for p in net.parameters():
            p.add_(1)
    assert list(reference) == list(before)
    assert all(torch.equal(reference[n], before[n]) for n in before)


def test_distance_against_its_definition(net):
    reference = Reference.of(net)
    generator = torch.Generator().manual_seed(1)
    squared, norm = {}, 0.0
    with torch.no_grad():
        for n, p in net.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            norm += p.double().square().sum().item()
            squared[n] = noise.double().square().sum().item()
            p.add_(noise)
    d = reference.distance(net)
    total = math.sqrt(sum(squared.values()))
    assert d.total == pytest.approx(total, rel=1e-5)
    assert d.relative == pytest.approx(total / math.sqrt(norm), rel=1e-5)
    assert d.per_parameter == pytest.approx({n: math.sqrt(s) for n, s in squared.items()}, rel=1e-5)
    for n, own in d.relative_per_parameter.items():
        assert own == pytest.approx(math.sqrt(squared[n]) / reference[n].norm().item(), rel=1e-5)
    assert d.without_anchor == ()


def test_distance_of_nothing_and_from_zero(net):
    reference = Reference.of(net)
    assert reference.distance(net).total == 0.0
    zero = Reference({n: torch.zeros_like(t) for n, t in reference.items()})
    assert zero.distance(net).relative == math.inf


def test_distance_leaves_new_parameters_out(net):
    body = Reference({n: t for n, t in Reference.of(net).items() if n.startswith("body")})
    assert body.distance(net).without_anchor == ("head.weight", "head.bias")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", ["file", "directory", "sharded"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_open_keeps_values_dtype_and_fingerprint(net, tmp_path, layout, dtype, device):
    reference = Reference.of(net.to(dtype))
    if layout == "sharded":
        write_sharded(dict(reference), tmp_path)
    else:
        reference.save(tmp_path / "model.safetensors")
    path = tmp_path / "model.safetensors" if layout == "file" else tmp_path
    opened = Reference.open(path, device=device)
    assert set(opened) == set(reference)
    for n, t in opened.items():
        assert t.dtype == dtype
        assert torch.equal(t, reference[n])
    assert opened.fingerprint() == reference.fingerprint()
    again = pickle.loads(pickle.dumps(opened))
    assert again.fingerprint() == reference.fingerprint()


def test_open_maps_the_file_and_does_not_read_it(tmp_path):
    save_file({"w": torch.ones(64 * 2**20)}, tmp_path / "model.safetensors")  # 256 MB

    def anonymous_kb():
        status = Path("/proc/self/status")
        if not status.exists():
            pytest.skip("resident memory is read from /proc, which only Linux has")
        return int(status.read_text().split("RssAnon:")[1].split()[0])

    before = anonymous_kb()
    opened = Reference.open(tmp_path)
    assert opened["w"][-1] == 1
    assert anonymous_kb() - before < 16 * 1024
    assert "mapped from" in repr(opened)


def test_fingerprint_sees_values_shapes_and_order():
    base = {"a": torch.arange(6.0), "b": torch.zeros(3)}
    seen = {
        Reference(t).fingerprint()
        for t in (
            base,
            {**base, "a": torch.arange(6.0).reshape(2, 3)},
            {**base, "a": torch.arange(6.0).flip(0)},
            {**base, "a": torch.arange(6.0) + torch.eye(6)[0] * 1e-6},
            {**base, "a": torch.tensor([1.0, 0.0, 2.0, 3.0, 4.0, 5.0])},
            {"a": base["b"], "b": base["a"]},
            {"a": base["a"]},
        )
    }
    assert len(seen) == 7
    renamed = Reference({f"x.{n}": t for n, t in base.items()})
    assert renamed.fingerprint() == Reference(base).fingerprint()


def test_fingerprint_sees_neighbours_swapped():
    a, b = torch.tensor([7, 8], dtype=torch.int32).view(torch.float32)
    one, two = (Reference({"t": torch.stack(t)}).fingerprint() for t in ((a, b), (b, a)))
    assert one != two


def test_a_pickled_mapping_notices_other_weights(net, tmp_path, monkeypatch):
    Reference.of(net).save(tmp_path / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    pickled = pickle.dumps(Reference.open("model.safetensors"))
    monkeypatch.chdir("/")
    assert pickle.loads(pickled).distance(net).total == 0
    Reference.of(make_net(torch.float32, seed=1)).save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="have changed"):
        pickle.loads(pickled)


def test_names_that_differ_only_by_a_wrapper_are_kept_apart():
    class Odd(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2))
            self.module = torch.nn.Linear(2, 1, bias=False)

    assert list(Reference.of(Odd())) == ["weight", "module.weight"]


def test_fingerprint_does_not_depend_on_dtype_strides_or_chunks(monkeypatch):
    t = torch.randn(100, 300).bfloat16()
    expected = Reference({"t": t}).fingerprint()
    assert Reference({"t": t.float()}).fingerprint() == expected
    assert Reference({"t": t.double()}).fingerprint() == expected
    assert Reference({"t": t.t().contiguous().t()}).fingerprint() == expected
    monkeypatch.setattr("holdfast._torch.fingerprint._CHUNK_CPU", 777)
    assert Reference({"t": t}).fingerprint() == expected


@pytest.mark.parametrize("value", [0.1, -2.0, 1 / 3, 1e300, 1e-50, 2**40, 2**60, 2**63 - 2])
def test_a_fingerprint_sees_changes_that_float32_rounds_off(value):
    if isinstance(value, int):
        near = [torch.tensor([5, value, -7]), torch.tensor([5, value + 1, -7])]
    else:
        some = torch.tensor([float("inf"), value, float("nan")], dtype=torch.float64)
        near = [some, torch.nextafter(some, torch.full_like(some, float("inf")))]
    before = [t.clone() for t in near]
    assert len({*tensor_fingerprints((t.shape, t) for t in near)}) == 2
    for t, then in zip(near, before, strict=True):
        assert torch.equal(t.view(torch.int64), then.view(torch.int64))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_a_fingerprint_sees_both_parts_of_complex_numbers(dtype):
    t = torch.tensor([[1 + 2j, 3 - 1j]], dtype=dtype)
    changed = [t, t + 1, t + 1j, t.conj(), t.mT]
    assert len({*tensor_fingerprints((t.shape, t) for t in changed)}) == len(changed)
    assert fingerprint([t.conj()]) == fingerprint([t.conj().resolve_conj()])
    assert fingerprint([t.to(torch.complex64)]) == fingerprint([t.to(torch.complex128)])


def test_a_fingerprint_of_unsigned_numbers():
    small, large = ([1, 2], [1, 2**63 + 1])
    unsigned = [torch.tensor(values, dtype=torch.uint64) for values in (small, large)]
    assert len({*tensor_fingerprints((t.shape, t) for t in unsigned)}) == 2
    assert fingerprint(unsigned[:1]) == fingerprint([torch.tensor(small)])


@pytest.mark.parametrize("chunk", [50, 777, 1 << 18])
def test_tensors_that_are_computed_together_have_the_fingerprints_of_single_ones(
    chunk, monkeypatch
):
    sizes = [5, 0, 300, 1000, 3, 3, 2000]
    tensors = [torch.randn(n, dtype=torch.bfloat16 if n == 3 else torch.float32) for n in sizes]
    shaped = [(t.shape, t) for t in tensors] + [((2, 2), None)]
    expected = tensor_fingerprints(shaped)
    assert len(set(expected)) == len(expected)
    monkeypatch.setattr("holdfast._torch.fingerprint._CHUNK_CPU", chunk)
    monkeypatch.setattr("holdfast._torch.fingerprint._packs", lambda device: True)
    assert tensor_fingerprints(shaped) == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_fingerprint_is_that_of_the_weights_when_it_was_started(together, monkeypatch):
    monkeypatch.setattr("holdfast._torch.fingerprint._packs", lambda device: together)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    before, started = model_fingerprint(model), started_model_fingerprint(model)
    with torch.no_grad():
        model[1].running_mean[3] += 1e-3
    assert started() == before != model_fingerprint(model)


def test_what_was_gathered_from_shards_is_freed(monkeypatch):
    """Only the end of a tensor waits for the next one, to be computed with it."""
    from torch.distributed.tensor import Shard, distribute_tensor

    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = distributed.init_device_mesh("cpu", (1,))
        values = torch.randn(1100)
        sharded = distribute_tensor(values, mesh, [Shard(0)])
        expected = tensor_fingerprints([(values.shape, values)] * 2)
        monkeypatch.setattr("holdfast._torch.fingerprint._CHUNK_CPU", 500)
        monkeypatch.setattr("holdfast._torch.fingerprint._packs", lambda device: True)
        assert tensor_fingerprints([(values.shape, sharded)] * 2) == expected
        digests = _Digests()
        digests.add(0, sharded)
        assert [piece.untyped_storage().nbytes() for *_, piece in digests.pieces] == [4 * 100]
    finally:
        distributed.destroy_process_group()


def test_statistics_are_referred_to_and_the_fingerprint_survives_saving(tmp_path):
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    net(torch.randn(4, 1, 5, 5))
    reference = Reference.of(net)
    assert torch.equal(reference["1.running_mean"], net[1].running_mean)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    assert Reference.open(tmp_path).fingerprint() == reference.fingerprint()
    assert len(reference.distance(net).per_parameter) == 4


def test_a_failed_save_leaves_the_old_file(net, tmp_path):
    reference = Reference.of(net)
    reference.save(tmp_path / "a.safetensors")
    shared = torch.zeros(4)
    with pytest.raises(RuntimeError):
        Reference({"x": shared, "y": shared}).save(tmp_path / "a.safetensors")
    assert Reference.open(tmp_path / "a.safetensors").fingerprint() == reference.fingerprint()
    assert [f.name for f in tmp_path.iterdir()] == ["a.safetensors"]


class TestBadFiles:
    def test_truncated(self, net, tmp_path):
        file = tmp_path / "model.safetensors"
        Reference.of(net).save(file)
        whole = file.read_bytes()
        for keep in (0, 4, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:keep])
            with pytest.raises(ValueError, match=r"model\.safetensors is not a readable"):
                Reference.open(file)

    def test_missing(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="no such file or directory"):
            Reference.open(tmp_path / "nowhere")
        with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors nor"):
            Reference.open(tmp_path)

    def test_missing_shard(self, net, tmp_path):
        write_sharded(dict(Reference.of(net)), tmp_path)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"lacks the shards model-00002-of-00002"):
            Reference.open(tmp_path)

    def test_shard_that_lacks_a_tensor(self, net, tmp_path):
        write_sharded(dict(Reference.of(net)), tmp_path)
        save_file({"other": torch.zeros(1)}, tmp_path / "model-00002-of-00002.safetensors")
        with pytest.raises(ValueError, match="lacks the tensors"):
            Reference.open(tmp_path)

    @pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "a/b.safetensors"])
    def test_index_that_leads_elsewhere(self, tmp_path, file):
        index = tmp_path / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"w": file}}))
        with pytest.raises(ValueError, match="outside its directory"):
            Reference.open(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}'])
    def test_index_that_is_none(self, tmp_path, text):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json (is|must)"):
            Reference.open(tmp_path)

    def test_pickle_is_not_read(self, net, tmp_path):
        torch.save(net.state_dict(), tmp_path / "model.safetensors")
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            Reference.open(tmp_path)


def test_a_reference_holds_tensors_only():
    with pytest.raises(TypeError, match="must map parameter names to tensors, got 'w': list"):
        Reference({"w": [1.0]})


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="ReLU has no parameters"):
        Reference.of(torch.nn.ReLU())
    with pytest.raises(ValueError, match="no parameter has an anchor"):
        Reference({"w": torch.zeros(1)}).distance(torch.nn.ReLU())
