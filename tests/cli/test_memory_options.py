"""``holdfast finetune`` and ``compare`` with options that fit a model into memory."""

import json
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("bitsandbytes", reason="the quantized extra is not installed")

from safetensors.torch import load_file  # noqa: E402

from holdfast.cli import main  # noqa: E402
from holdfast.hosts.job import Training  # noqa: E402
from small import make_llama, make_tokenizer, save  # noqa: E402

ROWS = [
    {"prompt": "two plus two is", "completion": "four"},
    {"prompt": "two plus three is", "completion": "five . the cat sat on the mat"},
] * 4
SMALL = ["--max-updates=3", "--batch-size=2", "--lr=1e-3"]


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    rows = "\n".join(map(json.dumps, ROWS))
    Path("train.jsonl").write_text(rows), Path("dev.jsonl").write_text(rows)
    Path("text.txt").write_text("the cat sat on the mat and the dog ran . " * 4)
    save(make_llama(), "base", make_tokenizer())


def finetune(*more, out="out"):
    given = ["--model=base", "--data=train.jsonl", f"--out={out}", *SMALL]
    return main(["finetune", *given, *more])


def history(out="out"):
    return [row["loss"] for row in json.loads(Path(out, "training.json").read_text())[1:]]


@pytest.mark.parametrize("recipe", ["standard", "holdfast", "flow", "distill", "lora"])
def test_gradient_checkpointing_changes_nothing(recipe, capsys):
    assert finetune(f"--recipe={recipe}") == 0
    assert finetune(f"--recipe={recipe}", "--gradient-checkpointing", out="again") == 0
    assert history("again") == pytest.approx(history(), rel=1e-5)
    assert "use_cache" not in capsys.readouterr().err


def test_packing(capsys):
    assert finetune("--recipe=holdfast", "--packing", "--max-length=32", "--epochs=1") == 0
    assert "8 samples are packed into 3 sequences" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("recipe", ["lora", "holdfast+lora"])
def test_quantized_weights_under_adapters(bits, recipe, capsys):
    assert finetune(f"--recipe={recipe}", f"--load-in-{bits}bit", "--gradient-checkpointing") == 0
    assert all("lora_" in name for name in load_file("out/adapter_model.safetensors"))
    assert main(["measure", "base", "out", "--target=dev.jsonl", "--context-free=0"]) == 0


def test_quantized_weights_are_not_trained(capsys):
    assert finetune("--recipe=recadam", "--load-in-4bit") == 2
    assert "add lora, which trains adapters" in capsys.readouterr().err
    assert finetune("--recipe=lora", "--load-in-4bit", "--load-in-8bit") == 2
    assert "load_in_4bit and load_in_8bit exclude each other" in capsys.readouterr().err


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_heads_of_several_layers_are_not_quantized(kind, bits):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=30, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=40, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    save(getattr(transformers, f"{kind}Model")(config), "encoder", make_tokenizer())
    rows = [
        {"text": f"the {word} sat", "label": label} for label, word in enumerate(("cat", "dog"))
    ]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    assert finetune("--model=encoder", "--recipe=lora", f"--load-in-{bits}bit") == 0
    found = load_file("out/adapter_model.safetensors")
    heads = {name: weight for name, weight in found.items() if "lora_" not in name}
    assert heads
    assert {weight.dtype for weight in heads.values()} == {torch.float32}
    assert main(["measure", "encoder", "out", "--target=train.jsonl"]) == 0


def test_a_new_head_is_not_quantized(capsys):
    rows = [
        {"text": f"the {word} sat", "label": label} for label, word in enumerate(("cat", "dog"))
    ]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    assert finetune("--recipe=lora", "--load-in-4bit", "--head=classification") == 0
    found = load_file("out/adapter_model.safetensors")
    head = next(found[name] for name in found if "score" in name)
    assert head.dtype == torch.float32
    assert head.shape == (2, 16)


@pytest.mark.usefixtures("forked_workers")
def test_compare_with_a_quantized_base(capsys):
    given = ["--model=base", "--data=train.jsonl", "--target=dev.jsonl", "--text=text.txt", *SMALL]
    given += ["--context-free=0", "--seeds=0", "--jobs=1", "--device=cpu", "--load-in-4bit"]
    assert main(["compare", *given, "--out=refused"]) == 2
    assert "add lora, which trains adapters" in capsys.readouterr().err
    # Before training, the base is as good as itself: quantization is not taken for forgetting.
    given[given.index("--lr=1e-3")] = "--lr=1e-30"
    assert main(["compare", *given, "--recipes", "lora", "--out=still"]) == 0
    (still,) = json.loads(Path("still/results.json").read_text())["runs"]
    for score in (still["target"], *still["retained"]):
        assert score["after"] == pytest.approx(score["before"], rel=1e-6)


@pytest.mark.usefixtures("forked_workers")
def test_a_comparison_in_bfloat16_does_not_take_rounding_for_forgetting(capsys):
    base = make_llama()
    save(base.to(torch.bfloat16), "half", make_tokenizer())
    given = ["--model=half", "--data=train.jsonl", "--target=dev.jsonl", "--text=text.txt"]
    given += ["--max-updates=2", "--batch-size=2", "--lr=1e-30", "--context-free=0", "--seeds=0"]
    more = ["--jobs=1", "--dtype=bfloat16", "--recipes", "standard", "lora", "--out=still"]
    assert main(["compare", *given, *more]) == 0
    for run in json.loads(Path("still/results.json").read_text())["runs"]:
        for score in (run["target"], *run["retained"]):
            assert score["after"] == pytest.approx(score["before"], rel=1e-6), run["recipe"]


def test_weights_in_bfloat16(capsys):
    more = ["--recipe=recadam", "--dtype=bfloat16"]
    assert finetune(*more) == 0
    assert "updates of less than .4 % of a weight are lost" in capsys.readouterr().err
    found = load_file("out/model.safetensors")
    assert {weight.dtype for weight in found.values()} == {torch.bfloat16}
    setting = ["--set", "update.stochastic_rounding", "true", "--set", "update.eight_bit", "true"]
    assert finetune(*more, *setting, out="rounded") == 0
    assert "are lost" not in capsys.readouterr().err


def test_packing_of_other_models_is_refused(capsys):
    rows = [
        {"text": f"the {word} sat", "label": label} for label, word in enumerate(("cat", "dog"))
    ]
    Path("train.jsonl").write_text("\n".join(map(json.dumps, rows * 4)))
    assert finetune("--packing", "--head=classification") == 2
    assert "packing joins texts for a language model" in capsys.readouterr().err


def test_the_device(capsys):
    for given in (["finetune", "--data=train.jsonl", "--out=out"], ["draw"]):
        assert main([*given, "--model=base", "--device=nowhere"]) == 2
        assert "device nowhere" in capsys.readouterr().err
    assert main(["score", "--model=base", "--data=train.jsonl", "--device=cpu"]) == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"dtype": "float16"}, "dtype must be one of 'float32', 'bfloat16'"),
        ({"packing": 1}, "packing must be True or False"),
        ({"dtype": "bfloat16", "load_in_4bit": True}, "a quantized model has no dtype bfloat16"),
        ({"load_in_4bits": True}, "did you mean 'load_in_4bit'"),
    ],
)
def test_bad_settings(given, words):
    with pytest.raises((TypeError, ValueError), match=words):
        Training(**given)
