"""Where a figure could be wrong without a word: it is right, or refused in a sentence."""

import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from safetensors.torch import load_file, save_file  # noqa: E402
from tokenizers import normalizers  # noqa: E402
from tokenizers.processors import TemplateProcessing  # noqa: E402

import holdfast  # noqa: E402
from holdfast.evaluate.classify import Classification  # noqa: E402
from holdfast.evaluate.probes import Completions, MultipleChoice, Text  # noqa: E402
from holdfast.io.encoding import encode_pair, tokenize  # noqa: E402
from holdfast.io.heads import model_kind  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from holdfast.io.rows import read_rows  # noqa: E402
from small import make_llama, make_tokenizer, noisy, save  # noqa: E402

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 20)


@pytest.fixture
def base(tmp_path):
    return save(make_llama(), tmp_path / "base", make_tokenizer())


def measure(*models, **options):
    return holdfast.measure(*models, **{"context_free": 0, "progress": False, **options})


def test_a_file_that_transformers_would_not_load(base):
    save_file(load_file(base / "model.safetensors"), base / "epoch3.safetensors")
    with pytest.raises(ValueError, match=r"loads only files named model\.safetensors"):
        measure(base, base / "epoch3.safetensors", text={"t": TEXT})


@pytest.mark.parametrize("change", ["prefix", "missing"])
def test_weights_that_would_be_random(base, tmp_path, change):
    save(make_llama(), tmp_path / "other", make_tokenizer())
    tensors = load_file(base / "model.safetensors")
    if change == "prefix":
        tensors = {f"_orig_mod.{name}": tensor for name, tensor in tensors.items()}
    else:
        tensors = {name: t for name, t in tensors.items() if ".layers.1." not in name}
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"is missing weights .* initialized randomly"):
        measure(base, tmp_path / "other", text={"t": TEXT})


def test_an_adapter_is_no_base(base, tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="pass the model that it was trained on"):
        measure(tmp_path / "adapter", tmp_path / "adapter")


def test_an_adapter_that_changes_its_base(base, tmp_path):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="olora")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="changes the base"):
        measure(base, tmp_path / "adapter")


def make_bert(cls, **more):
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, **more,
    )  # fmt: skip
    return cls(config).eval()


def test_only_causal_models_are_asked_what_comes_next():
    masked = make_bert(transformers.BertForMaskedLM)
    rows = [{"prompt": "the cat", "completion": "sat"}]
    choices = [{"goal": "a", "choices": ["cat", "dog"], "label": 0}]
    for probe in (Completions("c", rows), MultipleChoice("m", choices)):
        with pytest.raises(ValueError, match="needs a causal language model"):
            measure(masked, masked, probes=[probe], loader=Loader(tokenizer=make_tokenizer()))
    assert model_kind(make_bert(transformers.BertLMHeadModel)) == "other"
    assert model_kind(make_bert(transformers.BertLMHeadModel, is_decoder=True)) == "causal_lm"


def test_classes_need_a_head():
    rows = [{"text": "the cat", "label": 0}]
    model = make_llama()
    with pytest.raises(ValueError, match="predicts tokens: give both models a classification head"):
        measure(model, model, target={"t": rows}, loader=Loader(tokenizer=make_tokenizer()))


@pytest.mark.parametrize(("label", "words"), [(0.7, "label 0.7"), (-1, "label -1"), (5, "label 5")])
def test_labels_that_are_no_classes(label, words):
    model = make_bert(transformers.BertForSequenceClassification, num_labels=3)
    rows = [{"text": "the cat", "label": label}]
    with pytest.raises(ValueError, match=f"{words} is not one of the model's 3 classes"):
        measure(
            model,
            model,
            target={"t": rows},
            loader=Loader(tokenizer=make_tokenizer(cls_token="[CLS]")),
        )


def test_decoders_are_padded_with_their_own_token():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_labels=3, pad_token_id=3, initializer_range=1.0,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config).eval()
    rows = [{"text": "the cat", "label": 0}, {"text": "a dog ran on the mat and sat", "label": 1}]
    with Loader(tokenizer=make_tokenizer()).open(model) as loaded:
        together = Classification("c", rows).logits(loaded)
        alone = [Classification("c", [row]).logits(loaded)[0] for row in rows]
    for one, other in zip(together, alone, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_rows_of_spreadsheets(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_bytes('\ufefftext,label\n"line one\nline two\u2028three",1\n'.encode())
    assert read_rows(path) == [{"text": "line one\nline two\u2028three", "label": "1"}]


def test_choices_as_files_have_them():
    model = make_llama()

    def run(choices):
        rows = [{"goal": "the cat", "choices": choices, "label": 0}]
        with Loader(tokenizer=make_tokenizer()).open(model) as loaded:
            return MultipleChoice("m", rows).run(loaded, progress=False)

    plain = run(["sat on", "ran"])
    assert run(json.dumps(["sat on", "ran"])) == plain
    assert run({"text": ["sat on", "ran"], "label": ["A", "B"]}) == plain
    with pytest.raises(ValueError, match="row 0 must be a list"):
        run("sat on")


def test_both_models_are_tested_alike(base, tmp_path):
    """The same weights under another limit, and with another tokenizer beside them."""
    model = make_llama()
    model.config.max_position_embeddings = 32
    other = make_tokenizer()
    other._tokenizer.normalizer = normalizers.Replace("cat", "dog")
    save(model, tmp_path / "short", other)
    report = measure(base, tmp_path / "short", text={"t": TEXT})
    (score,) = report.scores
    assert score.after.value == pytest.approx(score.before.value, rel=1e-6)


def test_a_tokenizer_that_begins_with_bos():
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    assert tokenize(tokenizer, "the cat")[0] == tokenizer.bos_token_id
    with Loader(tokenizer=tokenizer, max_length=64).open(make_llama()) as loaded:
        begun = Text("t", TEXT).run(loaded, progress=False)
        pair = encode_pair(loaded, "the cat", " sat")
        bare = encode_pair(loaded, "", "the cat")
    assert sum(begun.counts) == len(TEXT.split())  # BOS is never a target
    assert pair.context == [tokenizer.bos_token_id, *tokenizer("the cat")["input_ids"][1:]]
    assert bare.context == [tokenizer.bos_token_id]
    assert len(bare.target) == 2
    with Loader(tokenizer=make_tokenizer(), max_length=64).open(make_llama()) as loaded:
        plain = Text("t", TEXT).run(loaded, progress=False)
    assert begun == plain  # which begins with BOS too, since the model names one


def test_positions_that_begin_after_the_paddings():
    torch.manual_seed(0)
    config = transformers.RobertaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=20, pad_token_id=1,
    )  # fmt: skip
    model = transformers.RobertaForMaskedLM(config).eval()
    tokenizer = make_tokenizer(cls_token="[CLS]", sep_token="[SEP]")
    with Loader(tokenizer=tokenizer).open(model) as loaded:
        assert loaded.limit == 18
        assert math.isfinite(sum(Text("t", TEXT).run(loaded, progress=False).values))


def test_tied_weights_in_memory_count_once():
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    report = measure(model, noisy(model))
    assert report.drift.total.size == sum(p.numel() for p in model.parameters())


def test_a_devices_name():
    with pytest.raises(ValueError, match="device nowhere"):
        Loader(device="nowhere").target_device()
