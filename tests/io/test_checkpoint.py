import json
import re
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from holdfast._torch import slices as slicing
from holdfast.io.checkpoint import open_weights


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch):
    monkeypatch.setattr(slicing, "SLICE", 7)


def write_shards(directory, tensors, files=2, config=None):
    directory.mkdir(exist_ok=True)
    names, weight_map = list(tensors), {}
    for i in range(files):
        here = names[i::files]
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({n: tensors[n] for n in here}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(here, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def tiny(num_hidden_layers=2, **options):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        **options,
    )
    return transformers.LlamaForCausalLM(config)


def whole(weights, name):
    return weights.read(name).view(weights[name].shape)


def assert_same(weights, tensors):
    assert set(weights) == set(tensors)
    for name, tensor in tensors.items():
        assert weights[name].shape == tuple(tensor.shape)
        torch.testing.assert_close(whole(weights, name).float(), tensor.float())


TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "a.bias": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
    "half": torch.ones(2, 3, dtype=torch.float16),
    "count": torch.tensor(3),
    "none": torch.empty(0, 2),
    "mask": torch.tensor([True, False]),
}


class TestSafetensors:
    def test_file_directory_and_shards(self, tmp_path):
        save_file(TENSORS, tmp_path / "model.safetensors")
        write_shards(tmp_path / "shards", TENSORS)
        for source in (tmp_path, tmp_path / "model.safetensors", str(tmp_path / "shards")):
            weights = open_weights(source)
            assert set(weights) == set(TENSORS)
            assert all(torch.equal(whole(weights, name), t) for name, t in TENSORS.items())
            assert all(weights[name].dtype == t.dtype for name, t in TENSORS.items())
        assert torch.equal(weights.read("a.weight", 5, 8), torch.tensor([5.0, 6.0, 7.0]))

    def test_missing_shard_is_named(self, tmp_path):
        write_shards(tmp_path, TENSORS)
        (tmp_path / "model-00002-of-00002.safetensors").unlink()
        with pytest.raises(FileNotFoundError, match=r"lacks the shards model-00002-of-00002"):
            open_weights(tmp_path)

    @pytest.mark.parametrize("keep", [0, 4, 30, -1])
    def test_cut_short_is_named(self, tmp_path, keep):
        file = tmp_path / "model.safetensors"
        save_file(TENSORS, file)
        file.write_bytes(file.read_bytes()[:keep])
        with pytest.raises(ValueError, match=re.escape(str(file)) + " is not a readable"):
            open_weights(tmp_path)

    def test_cut_short_later(self, tmp_path):
        file = tmp_path / "model.safetensors"
        save_file({"a": torch.ones(9)}, file)
        weights = open_weights(file)
        file.write_bytes(file.read_bytes()[:-4])
        with pytest.raises(ValueError, match="truncated while"):
            weights.read("a")

    def test_nothing_there(self, tmp_path):
        with pytest.raises(FileNotFoundError, match="has neither"):
            open_weights(tmp_path)
        with pytest.raises(FileNotFoundError, match="no such file or directory"):
            open_weights(tmp_path / "gone" / "deeper")

    def test_a_name_on_the_hub_is_looked_for_there(self, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        with pytest.raises(FileNotFoundError, match="nor a model on the hub"):
            open_weights("nobody/no-such-model")


class TestPickle:
    def test_refused_unless_allowed(self, tmp_path):
        tensors = {"a": torch.ones(3), "b": torch.zeros(2)}
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        torch.save({"state_dict": tensors, "epoch": 3}, tmp_path / "last.pt")
        for source in (tmp_path, tmp_path / "last.pt"):
            with pytest.raises(ValueError, match=r"pickled weights.*--allow-pickle"):
                open_weights(source)
            assert_same(open_weights(source, allow_pickle=True), tensors)

    def test_code_is_not_run(self, tmp_path):
        class Bomb:
            def __reduce__(self):
                return print, ("boom",)

        torch.save({"a": Bomb()}, tmp_path / "x.pt")
        with pytest.raises(ValueError, match="is not a readable file of tensors"):
            open_weights(tmp_path / "x.pt", allow_pickle=True)

    def test_shards(self, tmp_path):
        torch.save({"a": torch.ones(3)}, tmp_path / "pytorch_model-1.bin")
        index = {"weight_map": {"a": "pytorch_model-1.bin", "b": "pytorch_model-2.bin"}}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
        with pytest.raises(FileNotFoundError, match=r"pytorch_model-2\.bin"):
            open_weights(tmp_path, allow_pickle=True)
        torch.save({"b": torch.ones(3)}, tmp_path / "pytorch_model-2.bin")
        assert set(open_weights(tmp_path, allow_pickle=True)) == {"a", "b"}


def test_a_model():
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert_same(open_weights(model), model.state_dict())


class TestAdapter:
    def adapted(self, model, tmp_path, **options):
        """Saves base and adapter; returns the merged model's weights."""
        peft = pytest.importorskip("peft")
        model.save_pretrained(tmp_path / "base")
        config = peft.LoraConfig(**options)
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for p in adapted.parameters():
                if p.requires_grad:
                    p.add_(torch.randn_like(p), alpha=0.1)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        live = open_weights(adapted)
        live = {name: whole(live, name).clone() for name in live}
        return live, adapted.merge_and_unload().state_dict()

    @pytest.mark.parametrize(
        "options",
        [
            {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]},
            {"r": 3, "use_rslora": True, "target_modules": ["v_proj"]},
            {
                "r": 4,
                "target_modules": ["q_proj", "v_proj"],
                "rank_pattern": {"v_proj": 2},
                "alpha_pattern": {"layers.1.self_attn.q_proj": 40},
            },
            {"r": 2, "target_modules": ["q_proj"], "modules_to_save": ["norm", "lm_head"]},
            {"r": 2, "target_modules": ["embed_tokens", "q_proj"]},
        ],
        ids=["alpha", "rslora", "patterns", "modules-to-save", "embedding"],
    )
    def test_equals_peft_merged(self, tmp_path, options):
        model = tiny(tie_word_embeddings=False)
        live, merged = self.adapted(model, tmp_path, **options)
        weights = open_weights(tmp_path / "adapter", base=tmp_path / "base")
        assert_same(weights, merged)
        assert set(live) == set(merged)
        for name, tensor in merged.items():
            torch.testing.assert_close(live[name], tensor)
            flat = torch.cat([weights.read(name, *s) for s in slicing.slices(tensor.numel())])
            torch.testing.assert_close(flat.view(tensor.shape), tensor)

    @pytest.mark.filterwarnings("ignore:fan_in_fan_out")
    def test_conv1d(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2
        )
        model = transformers.GPT2LMHeadModel(config)
        options = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True}
        _, merged = self.adapted(model, tmp_path, **options)
        weights = open_weights(tmp_path / "adapter", base=tmp_path / "base")
        assert_same(weights, {name: merged[name] for name in weights})

    def test_base_from_the_adapter(self, tmp_path):
        _, merged = self.adapted(
            tiny(tie_word_embeddings=False), tmp_path, target_modules=["q_proj"]
        )
        with pytest.raises(FileNotFoundError, match="names no base: pass its base model"):
            open_weights(tmp_path / "adapter")
        file = tmp_path / "adapter" / "adapter_config.json"
        config = json.loads(file.read_text()) | {"base_model_name_or_path": str(tmp_path / "base")}
        file.write_text(json.dumps(config))
        assert_same(open_weights(tmp_path / "adapter"), merged)

    @pytest.mark.filterwarnings("ignore:Invalid `oft_block_size`")
    @pytest.mark.parametrize("kind", ["DORA", "OFT", "IA3", "VERA"])
    def test_other_adapters_are_merged_by_peft(self, kind, tmp_path):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        options = {"target_modules": ["q_proj", "down_proj"], "modules_to_save": ["norm"]}
        config = (
            peft.LoraConfig(use_dora=True, **options)
            if kind == "DORA"
            else (
                peft.get_peft_config({"peft_type": kind, **options})
                if kind != "IA3"
                else peft.IA3Config(feedforward_modules=["down_proj"], **options)
            )
        )
        model = tiny(tie_word_embeddings=False)
        model.save_pretrained(tmp_path / "base")
        adapted = peft.get_peft_model(model, config)
        with torch.no_grad():
            for p in adapted.parameters():
                if p.requires_grad:
                    p.add_(0.1 * torch.randn_like(p))
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        live = open_weights(adapted)
        live = {name: whole(live, name).clone() for name in live}
        merged = adapted.merge_and_unload().state_dict()
        for name, tensor in merged.items():
            torch.testing.assert_close(live[name], tensor)
        assert_same(open_weights(tmp_path / "adapter", base=tmp_path / "base"), merged)
        with pytest.raises(ValueError, match="pass the directory of its base model"):
            open_weights(tmp_path / "adapter", base=tiny(tie_word_embeddings=False))

    @pytest.mark.parametrize("change", ["fewer layers", "more layers", "renamed", "none"])
    @pytest.mark.parametrize("kind", ["IA3", "FOURIERFT"])
    def test_another_adapter_that_does_not_fit_its_base(self, kind, change, tmp_path):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        options = {"IA3": {"feedforward_modules": []}, "FOURIERFT": {"n_frequency": 4}}[kind]
        config = {"peft_type": kind, "target_modules": ["q_proj"], **options}
        layers = {"fewer layers": (4, 2), "more layers": (2, 4)}.get(change, (2, 2))
        adapted = peft.get_peft_model(
            tiny(num_hidden_layers=layers[0]), peft.get_peft_config(config)
        )
        adapted.save_pretrained(tmp_path / "adapter")
        tiny(num_hidden_layers=layers[1]).save_pretrained(tmp_path / "base")
        file = tmp_path / "adapter" / "adapter_model.safetensors"
        tensors = load_file(file)
        if change == "renamed":
            save_file({n.replace("q_proj", "proj"): t for n, t in tensors.items()}, file)
        elif change == "none":
            save_file({"x": torch.zeros(99)}, file)
        with warnings.catch_warnings():
            warnings.simplefilter("default")  # as for a user: PEFT only warns
            words = "has no values of" if change == "more layers" else "adapts .* does not have"
            with pytest.raises(ValueError, match=rf"{words}.*: pass the base model"):
                open_weights(tmp_path / "adapter", base=tmp_path / "base")

    def test_rows_of_single_tokens(self, tmp_path):
        peft = pytest.importorskip("peft", reason="the peft extra is not installed")
        config = peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[1, 2])
        adapted = peft.get_peft_model(tiny(), config)
        adapted.save_pretrained(tmp_path / "adapter")
        tiny().save_pretrained(tmp_path / "base")
        for source, base in ((adapted, None), (tmp_path / "adapter", tmp_path / "base")):
            with pytest.raises(ValueError, match="has rows of single tokens: merge it"):
                open_weights(source, base=base)

    def test_an_adapter_that_has_changed_its_base(self, tmp_path):
        self.adapted(tiny(), tmp_path, target_modules=["q_proj"])
        file = tmp_path / "adapter" / "adapter_config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
        with pytest.raises(ValueError, match="init_lora_weights=pissa, which changes the base"):
            open_weights(tmp_path / "adapter", base=tmp_path / "base")

    def test_wrong_base(self, tmp_path):
        self.adapted(tiny(), tmp_path, target_modules=["q_proj"])
        save_file({"x": torch.ones(2)}, tmp_path / "other.safetensors")
        with pytest.raises(ValueError, match=r"adapts .*q_proj.* does not have"):
            open_weights(tmp_path / "adapter", base=tmp_path / "other.safetensors")


def write_gguf(path, model):
    """A tiny Llama as llama.cpp would convert it, one matrix quantised to 8 bits."""
    gguf = pytest.importorskip("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        values = tensor.numpy()
        for kind, n in heads.items():
            if kind in name:
                rows = values.reshape(n, 2, values.shape[0] // n // 2, *values.shape[1:])
                values = rows.swapaxes(1, 2).reshape(values.shape)
        stored = names.get_name(name, try_suffixes=(".weight",))
        if "embed_tokens" in name:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


class TestGGUF:
    def test_names_and_values(self, tmp_path):
        transformers = pytest.importorskip("transformers")
        config = transformers.LlamaConfig(
            vocab_size=40,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        model = transformers.LlamaForCausalLM(config)
        write_gguf(tmp_path / "model.gguf", model)
        weights = open_weights(tmp_path / "model.gguf")
        expected = model.state_dict()
        assert set(weights) == set(expected)
        for name, tensor in expected.items():
            atol = 1e-3 if "embed_tokens" in name else 0
            torch.testing.assert_close(whole(weights, name), tensor, atol=atol, rtol=0)

    def test_not_a_gguf(self, tmp_path):
        pytest.importorskip("gguf")
        (tmp_path / "model.gguf").write_bytes(b"nothing of the sort")
        with pytest.raises(ValueError, match="is not a GGUF file"):
            open_weights(tmp_path / "model.gguf")


def test_few_files_of_many_shards_are_open(tmp_path):
    """A system allows a process a few hundred open files, and each thread opens its own."""
    from holdfast.io.weights import _MOST_FILES, Scratch

    names = [f"layer.{n}" for n in range(3 * _MOST_FILES)]
    for name in names:
        save_file({name: torch.full((2,), float(name[6:]))}, tmp_path / f"{name}.safetensors")
    index = {"metadata": {}, "weight_map": {name: f"{name}.safetensors" for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights, scratch = open_weights(tmp_path), Scratch()
    for name in [*names, *names[:2]]:
        assert weights.read(name, scratch=scratch).tolist() == [float(name[6:])] * 2
    files = list(scratch._files.values())
    assert len(files) == _MOST_FILES
    assert not any(file.closed for file in files)
    del scratch
    assert all(file.closed for file in files)
