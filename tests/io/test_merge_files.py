import json
import os

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast import Reference, WiseFT
from holdfast._torch import slices as slicing
from holdfast.io import merge as on_disk
from holdfast.io.merge import merge_on_disk

SHAPES = {"model.embed_tokens.weight": (9, 4), "model.layers.0.x.weight": (5, 4), "norm": (4,)}


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(slicing, "SLICE", 7)


def weights(dtype=torch.float32):
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def saved(directory, tensors):
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({"name": directory.name}))
    return directory


def shards(directory, tensors):
    directory.mkdir()
    weight_map = {}
    for i, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{i + 1:05}-of-{len(tensors):05}.safetensors"
        save_file({name: tensor}, directory / file)
        weight_map[name] = file
    index = json.dumps({"weight_map": weight_map})
    (directory / "model.safetensors.index.json").write_text(index)
    return directory


@pytest.fixture
def pair(tmp_path):
    return saved(tmp_path / "base", weights()), saved(tmp_path / "tuned", weights())


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_between(tmp_path, dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    base, tuned = weights(torch.float32), weights(dtype)
    out = merge_on_disk(
        saved(tmp_path / "base", base),
        saved(tmp_path / "tuned", tuned),
        tmp_path / "out",
        WiseFT(0.3),
    )
    torch.set_num_threads(before)
    merged = load_file(out / "model.safetensors")
    assert set(merged) == set(tuned)
    for name, tensor in merged.items():
        exact = (0.3 * tuned[name].double() + 0.7 * base[name].double()).to(dtype)
        assert tensor.dtype == dtype
        torch.testing.assert_close(tensor, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_ends_are_exact(tmp_path, dtype):
    base, tuned = weights(), weights(dtype)
    tuned["norm"][0] = float("nan")  # kept to the bit, too
    places = saved(tmp_path / "base", base), saved(tmp_path / "tuned", tuned)
    one = merge_on_disk(*places, tmp_path / "one", WiseFT(1))
    bits = {n: t.view(torch.uint8) for n, t in load_file(one / "model.safetensors").items()}
    assert all(torch.equal(bits[n], t.view(torch.uint8)) for n, t in tuned.items())
    zero = load_file(merge_on_disk(*places, tmp_path / "zero", WiseFT(0)) / "model.safetensors")
    assert all(torch.equal(zero[n], t.to(dtype)) for n, t in base.items())


def test_the_same_as_in_memory(tmp_path):
    base, tuned = nn.Linear(9, 5), nn.Linear(9, 5)
    save_file(base.state_dict(), tmp_path / "base.safetensors")
    save_file(tuned.state_dict(), tmp_path / "tuned.safetensors")
    out = merge_on_disk(
        tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", tmp_path / "out", WiseFT(0.7)
    )
    WiseFT(alpha=0.7).merge(tuned, Reference.of(base))
    merged = load_file(out / "model.safetensors")
    assert all(torch.equal(merged[n], t) for n, t in tuned.state_dict().items())


def test_new_resized_and_integer_tensors_stay_as_tuned(tmp_path):
    base = weights() | {"steps": torch.tensor(3), "head": torch.ones(3)}
    tuned = weights() | {"steps": torch.tensor(8), "head": torch.ones(2), "new": torch.ones(2)}
    out = merge_on_disk(
        saved(tmp_path / "base", base), saved(tmp_path / "tuned", tuned), tmp_path / "out", WiseFT()
    )
    merged = load_file(out / "model.safetensors")
    assert all(torch.equal(merged[name], tuned[name]) for name in ("steps", "head", "new"))


def test_shards_and_companions(tmp_path):
    base, tuned = weights(), weights()
    place = shards(tmp_path / "tuned", tuned)
    for name in ("config.json", "tokenizer.json", "tokenizer.model", "generation_config.json"):
        (place / name).write_text("{}")
    for name in ("optimizer.pt", "training_args.bin", "trainer_state.json"):
        (place / name).write_text(name)
    (place / "checkpoint-7").mkdir()
    out = merge_on_disk(saved(tmp_path / "base", base), place, tmp_path / "deep" / "out", WiseFT())
    files = {file.name for file in out.iterdir()}
    assert files == {
        *("config.json", "tokenizer.json", "tokenizer.model", "generation_config.json"),
        *(f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)),
        "model.safetensors.index.json",
    }
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * t.numel() for t in tuned.values())
    for name, file in index["weight_map"].items():
        torch.testing.assert_close(load_file(out / file)[name], (base[name] + tuned[name]) / 2)


def test_pickles_become_safetensors(tmp_path, pair):
    tuned = weights()
    (tmp_path / "old").mkdir()
    torch.save(tuned, tmp_path / "old" / "pytorch_model.bin")
    out = merge_on_disk(pair[0], tmp_path / "old", tmp_path / "out", WiseFT(1), allow_pickle=True)
    assert [file.name for file in out.iterdir()] == ["model.safetensors"]
    assert all(torch.equal(load_file(out / "model.safetensors")[n], t) for n, t in tuned.items())


def test_tied_weights_stay_tied(tmp_path):
    base, tuned = weights(), weights()
    tuned["lm_head.weight"] = tuned["model.embed_tokens.weight"].clone()
    out = merge_on_disk(
        saved(tmp_path / "base", base),
        saved(tmp_path / "tuned", tuned),
        tmp_path / "out",
        WiseFT(0.4),
    )
    merged = load_file(out / "model.safetensors")
    assert torch.equal(merged["lm_head.weight"], merged["model.embed_tokens.weight"])


def test_an_adapter_becomes_a_model(tmp_path):
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    base = tmp_path / "base"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(base)
    model = transformers.LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p)
    model.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "tokenizer.json").write_text("{}")
    out = merge_on_disk(base, tmp_path / "adapter", tmp_path / "out", WiseFT(0.5))
    names = {file.name for file in out.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    assert not any("adapter" in name for name in names)
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["default"] *= 0.5
    merged = transformers.LlamaForCausalLM.from_pretrained(out)
    assert merged.dtype == torch.bfloat16
    expected = model.merge_and_unload().state_dict()
    for name, tensor in merged.state_dict().items():
        torch.testing.assert_close(tensor, expected[name].bfloat16())


class TestPlace:
    def test_not_empty(self, tmp_path, pair):
        out = tmp_path / "out"
        out.mkdir()
        merge_on_disk(*pair, out, WiseFT(1))  # an empty directory is welcome
        with pytest.raises(FileExistsError, match="is not empty"):
            merge_on_disk(*pair, out, WiseFT())
        merge_on_disk(*pair, out, WiseFT(), overwrite=True)
        assert {f.name for f in out.iterdir()} == {"config.json", "model.safetensors"}
        assert {f.name for f in tmp_path.iterdir()} == {"base", "tuned", "out"}

    @pytest.mark.parametrize("name", ["thesis.tex", "data/train.jsonl", "train.json"])
    def test_only_a_checkpoint_is_replaced(self, tmp_path, pair, name):
        out = merge_on_disk(*pair, tmp_path / "out", WiseFT(1))
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("mine")
        with pytest.raises(FileExistsError, match="not part of a checkpoint"):
            merge_on_disk(*pair, out, WiseFT(), overwrite=True)
        assert (out / name).read_text() == "mine"
        assert (out / "model.safetensors").is_file()

    def test_what_a_kill_left_is_removed(self, tmp_path, pair):
        """A kill leaves the marker of the unfinished directory, and what was written so far."""
        out = tmp_path / "out"
        (out / ".model.0123abcd.tmp").mkdir(parents=True)
        (out / ".model.0123abcd.tmp" / "model.safetensors").write_text("cut")
        (out / "model.safetensors").write_text("cut")
        (out / ".holdfast").write_text("merge\n")
        merge_on_disk(*pair, out, WiseFT(1))
        whole = merge_on_disk(*pair, tmp_path / "whole", WiseFT(1))
        left, right = ({f.name: f.read_bytes() for f in d.iterdir()} for d in (out, whole))
        assert left == right

    @pytest.mark.parametrize("inside", ["", "base", "tuned", "base/new"])
    def test_among_the_sources(self, tmp_path, pair, inside):
        with pytest.raises(ValueError, match=r"outside the input|overwrite the input"):
            merge_on_disk(*pair, tmp_path / inside, WiseFT(), overwrite=True)
        assert (pair[0] / "model.safetensors").is_file()

    def test_a_failure_leaves_nothing(self, tmp_path, pair, monkeypatch):
        def fail(*_):
            raise OSError("the disk is full")

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="the disk is full"):
            merge_on_disk(*pair, tmp_path / "out", WiseFT())
        assert {f.name for f in tmp_path.iterdir()} == {"base", "tuned"}

    def test_a_failure_leaves_what_was_there(self, tmp_path, pair, monkeypatch):
        merge_on_disk(*pair, tmp_path / "out", WiseFT(1))
        before = (tmp_path / "out" / "model.safetensors").read_bytes()
        monkeypatch.setattr(on_disk, "_check_room", lambda *_: None)
        monkeypatch.setattr(on_disk, "header_for", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            merge_on_disk(*pair, tmp_path / "out", WiseFT(0), overwrite=True)
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == before

    def test_no_room(self, tmp_path, pair, monkeypatch):
        monkeypatch.setattr(on_disk.shutil, "disk_usage", lambda _: type("", (), {"free": 3}))
        with pytest.raises(OSError, match=r"0\.0 GB of free space"):
            merge_on_disk(*pair, tmp_path / "out", WiseFT())

    def test_a_live_model(self, tmp_path, pair):
        with pytest.raises(ValueError, match="no files to write again"):
            merge_on_disk(pair[0], nn.Linear(2, 2), tmp_path / "out", WiseFT())

    def test_alpha(self, tmp_path, pair):
        with pytest.raises(ValueError, match="alpha"):
            merge_on_disk(*pair, tmp_path / "out", WiseFT(1.5))
