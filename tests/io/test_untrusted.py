"""Checkpoints that others wrote: nothing of them is run, hangs, or is misread without a word."""

import ast
import io
import json
import os
import shutil
import sys
import time
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from matrices import sampled
from small import make_llama, make_tokenizer, noisy, save

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast  # noqa: E402
from holdfast import WiseFT  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.io import hub, patterns  # noqa: E402
from holdfast.io.checkpoint import open_weights  # noqa: E402
from holdfast.io.heads import config_of  # noqa: E402
from holdfast.io.merge import merge_on_disk  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from holdfast.io.pairing import check_not_packed  # noqa: E402
from holdfast.io.patterns import matching  # noqa: E402
from holdfast.io.untrusted import from_pretrained  # noqa: E402
from holdfast.io.weights import LiveWeights  # noqa: E402


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A directory with a base, a tuned model, and rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    base = make_llama()
    save(base, "base", make_tokenizer())
    save(noisy(base), "tuned", make_tokenizer())
    Path("rows.jsonl").write_text('{"prompt": "the cat", "completion": "sat"}\n' * 4)
    return tmp_path


def change(file, **values):
    file = Path(file)
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def said(capsys, *arguments):
    assert main(arguments) == 2
    *_, last = capsys.readouterr().err.splitlines()
    assert last.startswith("holdfast: ")
    return last


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path(r"{ran}").touch()

class TheirConfig(LlamaConfig):
    model_type = "theirs"

class TheirForCausalLM(LlamaForCausalLM):
    config_class = TheirConfig

class TheirTokenizer(PreTrainedTokenizerFast):
    pass
"""


def with_code(folder, ran, what):
    """Add Python code to a model, of its configuration or of its tokenizer."""
    (Path(folder) / "theirs.py").write_text(CODE.format(ran=ran))
    autos = {"AutoConfig": "theirs.TheirConfig", "AutoModelForCausalLM": "theirs.TheirForCausalLM"}
    if what == "model":
        config = Path(folder, "config.json")
        change(config, model_type="theirs", architectures=["TheirForCausalLM"], auto_map=autos)
    else:
        auto = {"AutoTokenizer": [None, "theirs.TheirTokenizer"]}
        tokenizer = Path(folder, "tokenizer_config.json")
        change(tokenizer, tokenizer_class="TheirTokenizer", auto_map=auto)


LOADING = [
    ("measure", "base", "tuned", "--text=text.txt", "--context-free=0"),
    ("merge", "base", "tuned", "--sweep=0.5", "--text=text.txt", "--out=out"),
    ("score", "--model=tuned", "--data=rows.jsonl"),
    ("finetune", "--model=tuned", "--data=rows.jsonl", "--out=out", "--max-updates=1"),
    ("draw", "--model=tuned"),
    ("compare", "--model=tuned", "--data=rows.jsonl", "--target=rows.jsonl", "--out=out"),
]
CODE_OF = [*product(LOADING, ["model", "tokenizer"])]


# A command with a foreign tokenizer runs to its end; one function loads for all of them.
@pytest.mark.parametrize(
    ("command", "what"),
    sampled(CODE_OF, [*product(LOADING, ["model"]), (LOADING[2], "tokenizer")]),
    ids=[f"{command[0]}-{what}" for command, what in CODE_OF],
)
def test_code_of_a_model_is_not_run(command, what, place, monkeypatch, capsys):
    Path("text.txt").write_text("the cat sat on the mat")
    with_code("tuned", place / "ran", what)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 9))
    status = main(command)
    assert not (place / "ran").exists()
    if what == "model" and command[0] != "merge":  # whose models are made of files
        assert status == 2
        assert "--trust-remote-code" in capsys.readouterr().err


def test_code_of_a_model_is_run_if_asked_for(place, capsys):
    with_code("tuned", place / "ran", "model")
    given = ["--data=rows.jsonl", "--trust-remote-code", "--out=out"]
    assert main(["score", "--model=tuned", *given]) == 0
    assert (place / "ran").exists()
    assert "median loss" in capsys.readouterr().out
    with Loader(trust_remote_code=True).open("tuned") as loaded:
        assert type(loaded.model).__name__ == "TheirForCausalLM"


def test_only_one_function_loads_what_others_wrote():
    """It says whether code may run. PEFT's own call, of a checked adapter, runs none."""
    root = Path(holdfast.__file__).parent
    found = {
        file.relative_to(root).as_posix()
        for file in root.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    }
    assert found == {"io/untrusted.py", "io/models.py"}


@pytest.mark.parametrize("name", ["nosuch", "no/such", "./nosuch", "a/b/c"])
def test_a_missing_model_is_said_at_once(name, place, monkeypatch):
    monkeypatch.setattr(hub, "_is_reachable", lambda: False)
    begin = time.monotonic()
    for load in (config_of, Loader().load, Loader().config_of, open_weights):
        with pytest.raises(OSError, match=f"{name} is not a local file|no such"):
            load(name)
    assert time.monotonic() - begin < 5


def test_a_cached_model_needs_no_network(place, monkeypatch):
    seen = {}

    class Auto:
        @staticmethod
        def from_pretrained(where, **options):
            seen.update(options)

    monkeypatch.setattr(hub, "_is_reachable", lambda: False)
    monkeypatch.setattr(hub, "_is_cached", lambda *_: True)
    from_pretrained(Auto, "their/model", trust_remote_code=False)
    assert seen == {"local_files_only": True, "trust_remote_code": False}


def adapter(folder="adapter", **values):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    model = transformers.LlamaForCausalLM.from_pretrained("base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(folder)
    change(Path(folder, "adapter_config.json"), **{"base_model_name_or_path": "base", **values})
    return folder


@pytest.mark.parametrize("key", ["alpha_pattern", "rank_pattern", "target_modules"])
def test_a_pattern_that_never_ends(key, place, monkeypatch, capsys):
    monkeypatch.setattr(patterns, "_LIMIT", 1.0)
    forever = "([a-z._0-9]+)+!"
    adapter(**{key: forever if key == "target_modules" else {forever: 2}})
    begin = time.monotonic()
    line = said(capsys, "measure", "base", "adapter", "--context-free=1", "--text=rows.jsonl")
    assert "takes longer than 1 seconds" in line or "column text" in line
    Path("text.txt").write_text("the cat sat on the mat")
    line = said(capsys, "measure", "base", "adapter", "--no-drift", "--text=text.txt")
    assert f"{forever!r} takes longer than 1 seconds" in line
    assert time.monotonic() - begin < 60


def test_patterns_match_as_those_of_peft():
    names = ["a.layers.0.q_proj", "a.layers.1.q_proj", "b.k_proj"]
    found = matching([r"layers\.0\..*", "^b.k_proj", "proj"], names, "here")
    assert found == {r"layers\.0\..*": names[:1], "^b.k_proj": names[2:], "proj": []}
    with pytest.raises(ValueError, match="here: '\\(' is not a regular expression"):
        matching(["("], names, "here")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lora_alpha": "big"}, "lora_alpha must be a number, got 'big'"),
        ({"lora_alpha": None}, "lora_alpha must be a number, got 'None'"),
        ({"r": None}, "r must be a positive whole number, got 'None'"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern must be numbers by name"),
        ({"r": -1}, "r must be a positive whole number"),
        ({"r": 10**9}, "the rank 1000000000 is not the one of its matrices"),
        ({"peft_type": "VBLORA", "num_vectors": 10**9}, "the rank 1000000000 is not"),
        ({"layer_replication": [[0, 10**9]]}, "layer_replication must be null"),
        ({"peft_type": "ADALORA", "init_r": 10**7}, "ADALORA changes its ranks in calls between"),
        ({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 10**9}, "changes what the model"),
        ({"peft_type": "XLORA", "adapters": {"a": "their/model"}}, "changes what the model reads"),
        ({"peft_type": "LORRA"}, "PEFT has no adapter LORRA"),
        ({"target_modules": 7}, "target_modules must be names of modules"),
        ({"base_model_name_or_path": ["base"]}, "base_model_name_or_path must be text"),
        ({"megatron_config": {}, "megatron_core": "os"}, "megatron_config must be null"),
    ],
)
def test_settings_of_an_adapter(values, words, place):
    adapter(**values)
    with pytest.raises(ValueError, match=words):
        Loader().load("adapter", base="base")


def test_an_adapter_without_a_rank(place):
    """``r`` is null in the settings of some kinds."""
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    base = transformers.LlamaForCausalLM.from_pretrained("base")
    config = peft.get_peft_config({"peft_type": "SUPERTUNING", "target_modules": ["q_proj"]})
    adapted = peft.get_peft_model(base, config)
    with torch.no_grad():
        for p in adapted.parameters():
            if p.requires_grad:
                p.add_(0.1)
    adapted.save_pretrained("adapter")
    wanted = adapted.merge_and_unload().state_dict()
    found = Loader(device="cpu").load("adapter", base="base").state_dict()
    assert all(torch.allclose(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("text", ["[1, 2]", "{", "null", "[" * 10**5, "\x00\xff", '"a"'])
@pytest.mark.parametrize(
    ("file", "where"),
    [
        ("config.json", "tuned"),
        ("tokenizer_config.json", "tuned"),
        ("model.safetensors.index.json", "tuned"),
        ("adapter_config.json", "adapter"),
    ],
)
def test_json_of_another_shape_is_named(file, where, text, place, capsys):
    if where == "adapter":
        adapter()
    if "index" in file:
        Path(where, "model.safetensors").unlink()
    Path(where, file).write_text(text)
    Path("text.txt").write_text("the cat sat on the mat")
    line = said(capsys, "measure", "base", where, "--text=text.txt", "--context-free=0")
    assert f"{where}/{file} " in line


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 0 to 5000"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of names, got text"),
        ({"hidden_size": "large"}, "tuned"),
    ],
)
def test_values_of_a_configuration(values, words, place, capsys):
    change("tuned/config.json", **values)
    assert words in said(capsys, "score", "--model=tuned", "--data=rows.jsonl")


def test_an_index_of_other_things(place):
    Path("tuned/model.safetensors").unlink()
    for index in ({"weight_map": 3}, {}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../b"}}):
        Path("tuned/model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(ValueError, match=r"index.json (is not an index|names a shard)"):
            open_weights("tuned")


def requantized(folder, dtype, share):
    """Store some of the weights with one byte each."""
    file = Path(folder, "model.safetensors")
    tensors = load_file(file)
    names = [name for name in tensors if "layers.1.mlp" in name][:share]
    tensors |= {name: tensors[name].to(dtype) for name in names}
    save_file(tensors, file, metadata={"format": "pt"})
    return names


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("which", ["base", "tuned"])
def test_a_few_quantized_weights_are_refused(dtype, which, place, capsys):
    (name,) = requantized(which, dtype, 1)
    for command in (
        ["merge", "base", "tuned", "--alpha=0.3", "--out=out"],
        ["measure", "base", "tuned", "--context-free=0"],
        ["measure", "base", "tuned", "--no-drift", "--context-free=2"],
    ):
        line = said(capsys, *command)
        assert f"{which} holds 1 quantized tensors ({str(dtype)[6:]})" in line
        assert name in line
    assert not Path("out").exists()


def test_integers_that_are_no_weights(place):
    tensors = {
        "embeddings.position_ids": torch.arange(4)[None],
        "h.0.attn.bias": torch.ones(1, 1, 4, 4, dtype=torch.uint8),
        "bn.num_batches_tracked": torch.tensor(3),
        "swin.relative_position_index": torch.zeros(4, 4, dtype=torch.int64),
        "seen": torch.zeros(2, 2, dtype=torch.bool),
    }
    check_not_packed(LiveWeights("model", tensors))
    with pytest.raises(ValueError, match=r"1 quantized tensors \(int32\).*a.qweight"):
        check_not_packed(LiveWeights("m", {**tensors, "a.qweight": torch.zeros(2).int()}))


def test_a_tuned_model_without_some_weights_is_not_merged(place, capsys):
    tensors = load_file("tuned/model.safetensors")
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != lost}, "tuned/model.safetensors")
    line = said(capsys, "merge", "base", "tuned", "--out=out")
    assert f"tuned lacks 1 tensors of base, so it is not a complete model: {lost}" in line
    assert not Path("out").exists()


def test_a_tuned_model_may_lack_the_old_head(place):
    tensors = load_file("tuned/model.safetensors")
    tensors["score.weight"] = tensors.pop("lm_head.weight")[:3]
    save_file(tensors, "tuned/model.safetensors")
    change("tuned/config.json", architectures=["LlamaForSequenceClassification"])
    assert merge_on_disk("base", "tuned", "out", WiseFT()).is_dir()


def test_an_adapted_embedding(place, capsys):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    model = transformers.LlamaForCausalLM.from_pretrained("base")
    config = peft.LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"], lora_alpha=4)
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_" in name:
                p.normal_()
    adapted.save_pretrained("adapter", save_embedding_layers=True)
    whole = adapted.merge_and_unload().state_dict()["model.embed_tokens.weight"]
    read = open_weights("adapter", base="base")
    torch.testing.assert_close(read.read("model.embed_tokens.weight").view_as(whole), whole)
    assert main(["measure", "base", "adapter", "--context-free=1"]) == 0


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_file_without_permission_is_named(place, monkeypatch):
    shutil.copytree("tuned", "locked")
    real = open

    def refuse(file, *more, **options):  # root may read everything
        if str(file) == "locked/model.safetensors":
            raise PermissionError(13, "Permission denied", str(file))
        return real(file, *more, **options)

    monkeypatch.setattr("builtins.open", refuse)
    for load in (open_weights, Loader().load):
        with pytest.raises(PermissionError) as caught:
            load("locked")
        assert caught.value.filename == "locked/model.safetensors"


def test_a_device_without_values(place, capsys):
    given = ("measure", "base", "tuned", "--device=meta", "--context-free=1")
    assert "device meta: it holds no values" in said(capsys, *given)
