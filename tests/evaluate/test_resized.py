"""Models with other numbers of tokens: what both have is compared and merged, the rest is named."""

import copy
import json

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import holdfast
from holdfast import Loader, Reference, Run, WiseFT, measure
from holdfast.cli import main
from holdfast.evaluate.drift import drift
from holdfast.evaluate.kl import ContextFreeKL, masked_kl
from holdfast.evaluate.probes import Text
from holdfast.evaluate.report import Vocabulary
from holdfast.hosts.raw import train_loop
from holdfast.io.checkpoint import open_weights
from holdfast.io.merge import merge_on_disk
from holdfast.io.tokens import token_change
from holdfast.report.words import percent
from small import make_llama, make_tokenizer, noisy, save

TOKENS = len(make_tokenizer())
NEW = ["<|tool|>", "<|end|>", "<|x|>"]
TEXT = "the cat sat on the mat . a dog ran on the log . " * 20


def make_gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=TOKENS, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=2,
        eos_token_id=3, initializer_range=0.5,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def make_bert():
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=TOKENS, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64, initializer_range=0.5,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config).eval()


FAMILIES = {
    "tied": lambda: make_llama(vocab=TOKENS, tie_word_embeddings=True),
    "untied": lambda: make_llama(vocab=TOKENS, tie_word_embeddings=False),
    "gpt2": make_gpt2,
    "bert": make_bert,
}


def resized(model, tokens, **options):
    """A copy of a model with another number of tokens."""
    other = copy.deepcopy(model)
    other.resize_token_embeddings(tokens, mean_resizing=False, **options)
    return other.eval()


def token_rows(model):
    """The tensors of a model with a row per token, each once."""
    count = model.get_input_embeddings().num_embeddings
    return {name: p for name, p in model.named_parameters() if len(p) == count}


def grown_tokenizer():
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(NEW, special_tokens=True)
    return tokenizer


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """The folders of a base, and of a noisy model with three new tokens, by family."""
    folder = tmp_path_factory.mktemp("resized")
    for name, make in FAMILIES.items():
        save(make(), folder / name, make_tokenizer())
        save(noisy(resized(make(), TOKENS + 3)), folder / f"{name}-tuned", grown_tokenizer())
    return folder


@pytest.mark.parametrize("more", [3, 36, -4])
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_rows_count_and_others_do_not(family, more):
    base = FAMILIES[family]()
    tuned = resized(base, TOKENS + more)
    shared = min(TOKENS, TOKENS + more)
    found = drift(base, tuned)
    assert found.total.distance == 0
    assert found.vocabulary == Vocabulary(TOKENS, TOKENS + more)
    assert found.only_base == found.only_tuned == ()
    assert token_rows(tuned)
    with torch.no_grad():
        for p in token_rows(tuned).values():
            p[shared:] += 7
            p[shared - 1] += 2
    moved = drift(base, tuned)
    weights = sum(p[0].numel() for p in token_rows(tuned).values())
    assert moved.total.distance == pytest.approx((4 * weights) ** 0.5, rel=1e-5)
    assert moved.total.size == found.total.size


@settings(max_examples=20, deadline=None)
@given(
    rows=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    changed=st.integers(0, 8),
    size=st.floats(-3, 3, width=32),
)
def test_only_shared_rows_count(rows, changed, size):
    name = "model.embed_tokens.weight"
    old, new = torch.zeros(rows[0], 3), torch.zeros(rows[1], 3)
    new[changed:] = size
    before = open_weights(_Named({name: old, "norm": torch.ones(2)}))
    after = open_weights(_Named({name: new, "norm": torch.ones(2)}))
    counted = 3 * max(0, min(rows) - changed)
    assert drift(before, after).total.distance == pytest.approx(abs(size) * counted**0.5)


class _Named(torch.nn.Module):
    """A model with given names of its tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.tensors = tensors

    def state_dict(self, *args, **kwargs):
        return self.tensors


def test_positions_and_classes_are_not_tokens():
    def weights(tokens, positions, classes):
        return _Named({
            "transformer.wte.weight": torch.ones(tokens, 4),
            "transformer.wpe.weight": torch.ones(positions, 4),
            "score.weight": torch.ones(classes, 4),
            "transformer.h.0.weight": torch.ones(4, 4),
            "transformer.h.1.weight": torch.ones(4, 4),
            "transformer.h.2.weight": torch.ones(4, 4),
        })  # fmt: skip

    found = drift(weights(30, 8, 2), weights(33, 16, 3))
    assert found.vocabulary == Vocabulary(30, 33)
    assert found.only_tuned == (
        "transformer.wpe.weight (8×4 → 16×4)",
        "score.weight (2×4 → 3×4)",
    )
    assert drift(weights(30, 8, 2), weights(30, 16, 3)).vocabulary is None


def test_a_tied_base_and_an_untied_tuned_model(tmp_path, disk):
    tuned = noisy(resized(FAMILIES["tied"](), TOKENS + 3))
    tuned.config.tie_word_embeddings = False
    tuned.lm_head.weight = torch.nn.Parameter(tuned.lm_head.weight.detach().clone() + 1)
    save(tuned, tmp_path / "untied", grown_tokenizer())
    found = drift(disk / "tied", tmp_path / "untied")
    assert found.only_base == found.only_tuned == ()
    sizes = {row.name: row.size for row in found.tensors}
    assert sizes["lm_head.weight"] == sizes["model.embed_tokens.weight"] == TOKENS * 16
    back = drift(tmp_path / "untied", disk / "tied")
    assert back.vocabulary == Vocabulary(TOKENS + 3, TOKENS)
    assert {row.name: row.size for row in back.tensors} == sizes


def test_other_tokens_at_the_same_rows_are_not_compared(tmp_path, disk):
    other = make_tokenizer("is plus three two and log mat on ran sat dog cat a the")
    save(resized(FAMILIES["untied"](), len(other)), tmp_path / "other", other)
    assert not token_change(disk / "untied", tmp_path / "other").same_ids
    report = measure(disk / "untied", tmp_path / "other", progress=False)
    assert report.drift.vocabulary is None
    assert len(report.drift.only_tuned) == 2
    assert report.divergences == ()
    assert "14 of 21 tokens" in report.notes[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_model_with_other_ids(tmp_path, disk, family):
    """Its embedding and its head are in another order, like the ids of its tokenizer."""
    model, order = FAMILIES[family](), [*range(7), *reversed(range(7, TOKENS))]
    with torch.no_grad():
        for p in token_rows(model).values():
            p.copy_(p[order].clone())
    words = make_tokenizer().convert_ids_to_tokens(order)
    save(model, tmp_path / "other", make_tokenizer(" ".join(words[7:])))
    base, other, tests = disk / family, tmp_path / "other", {"text": {"words": TEXT}}
    report = measure(base, other, **tests, progress=False)
    assert report.drift.total.distance == 0
    assert len(report.drift.only_tuned) == len(token_rows(model))
    assert all(name.endswith("(rows of other tokens)") for name in report.drift.only_tuned)
    assert report.divergences == report.scores == ()
    (note,) = report.notes
    assert note.startswith("20 of 27 tokens have other ids in the tuned model's tokenizer, so the")
    out = merge_on_disk(base, other, tmp_path / "out", WiseFT(0.5))
    merged = load_file(out / "model.safetensors")
    expected = load_file(other / "model.safetensors")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.items())


@pytest.mark.parametrize(("words", "moved"), [(1000, 2), (1000, 20), (4, 4)])
def test_tokens_with_other_ids_are_counted(tmp_path, words, moved):
    names = [f"w{i}" for i in range(words)]
    for folder, vocabulary in (("one", names), ("two", names[:moved][::-1] + names[moved:])):
        save(FAMILIES["tied"](), tmp_path / folder, make_tokenizer(" ".join(vocabulary)))
    change = token_change(tmp_path / "one", tmp_path / "two")
    assert (change.both, change.moved) == (words + 7, moved)
    report = measure(tmp_path / "one", tmp_path / "two", context_free=2, progress=False)
    assert len(report.divergences) == (moved == 2)
    assert report.notes[0].startswith(f"{moved} of {words + 7:,} tokens have other ids")
    assert token_change(tmp_path / "one", tmp_path / "one").moved == 0


def test_names_of_new_tokens(tmp_path, disk):
    assert token_change(disk / "tied", disk / "tied-tuned").new == tuple(NEW)
    assert token_change(disk / "tied-tuned", disk / "tied").new == ()
    assert token_change(disk / "tied", disk / "tied").same_ids
    assert token_change(disk / "tied", tmp_path).same_ids  # it has no tokenizer
    unigram = {"model": {"vocab": [["<unk>", 0.0], ["a", -1.0]]}, "added_tokens": [{"id": "?"}]}
    for folder, extra in (("one", []), ("two", [{"id": 2, "content": "<|new|>"}])):
        (tmp_path / folder).mkdir()
        content = {**unigram, "added_tokens": [*unigram["added_tokens"], *extra]}
        (tmp_path / folder / "tokenizer.json").write_text(json.dumps(content))
    assert token_change(tmp_path / "one", tmp_path / "two").new == ("<|new|>",)


@torch.no_grad()
def expected_kl(base, tuned, sequences):
    """Σ KL over the shared tokens, per prediction, in float64."""
    shared = min(m.get_input_embeddings().num_embeddings for m in (base, tuned))
    total, count, outside = 0.0, 0, 0.0
    for ids in sequences:
        logits = [m(torch.tensor([ids])).logits[0].double() for m in (base, tuned)]
        p, q = (z[:, :shared].log_softmax(-1) for z in logits)
        total += float((p.exp() * (p - q)).sum())
        outside += sum(float(z.softmax(-1)[:, shared:].sum()) for z in logits)
        count += len(ids)
    return total / count, count, outside / count


@pytest.mark.parametrize("more", [3, 36, -4])
@pytest.mark.parametrize("family", ["tied", "untied", "gpt2"])
def test_context_free_kl_over_the_shared_tokens(tmp_path, family, more):
    base = FAMILIES[family]()
    tuned = noisy(resized(base, TOKENS + more))
    kl, shared = ContextFreeKL(texts=16, tokens=8), min(TOKENS, TOKENS + more)
    with Loader().open(base) as loaded:
        kl.remember(loaded, tmp_path, progress=False)
    with Loader().open(tuned) as loaded:
        found = kl.compare(loaded, progress=False)
    texts = [
        ids[: next((i for i, token in enumerate(ids) if token >= shared), None)] for ids in kl._ids
    ]
    assert more > 0 or texts != kl._ids  # some texts are cut
    value, predictions, outside = expected_kl(base, tuned, texts)
    assert found.kl.value == pytest.approx(value, rel=1e-4)
    assert found.predictions == predictions
    who = "tuned model" if more > 0 else "base"
    assert found.how.endswith(
        f"; over the {shared} tokens of both models (the others have "
        f"{percent(outside)} of the {who}'s probability)"
    )


def test_masked_kl_over_the_shared_tokens(tmp_path):
    base = make_bert()
    tuned = resized(base, TOKENS + 3)
    loader = Loader(tokenizer=make_tokenizer(cls_token="[CLS]", sep_token="[SEP]"))
    kl = masked_kl("words", TEXT)
    with loader.open(base) as loaded:
        kl.remember(loaded, tmp_path, progress=False)
    with loader.open(tuned) as loaded:
        assert kl.compare(loaded, progress=False).kl.value == pytest.approx(0, abs=1e-6)
    with loader.open(noisy(tuned)) as loaded:
        found = kl.compare(loaded, progress=False)
    assert found.kl.value > 0
    assert f"over the {TOKENS} tokens of both models" in found.how


def test_a_removed_token_is_refused_in_one_sentence():
    tuned = resized(FAMILIES["tied"](), 12)
    with Loader(tokenizer=make_tokenizer()).open(tuned) as loaded:
        test = Text("words", TEXT)
        with pytest.raises(ValueError, match="token 24 is not in the model's vocabulary of 12"):
            test.run(loaded, progress=False)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("back", [False, True], ids=["more tokens", "fewer tokens"])
def test_merged_on_disk_as_in_memory(tmp_path, disk, family, back, monkeypatch):
    monkeypatch.setattr(holdfast._torch.slices, "SLICE", 23)  # slices end within rows
    base, tuned = (disk / family, disk / f"{family}-tuned")[:: -1 if back else 1]
    out = merge_on_disk(base, tuned, tmp_path / "out", WiseFT(0.3))
    before, after, merged = (load_file(f / "model.safetensors") for f in (base, tuned, out))
    assert merged.keys() == after.keys()
    for name, tensor in merged.items():
        shared = min(len(before[name]), len(after[name]))
        between = torch.lerp(before[name][:shared], after[name][:shared], 0.3)
        assert torch.equal(tensor, torch.cat([between, after[name][shared:]]))
    config = json.loads((out / "config.json").read_text())
    assert config["vocab_size"] == TOKENS + 3 * (not back)
    assert (out / "tokenizer.json").read_bytes() == (tuned / "tokenizer.json").read_bytes()

    model = getattr(transformers, config["architectures"][0]).from_pretrained(tuned)
    reference = Reference.open(base)
    total = drift(base, tuned).total.distance
    assert reference.distance(model).total == pytest.approx(total, rel=1e-5)
    WiseFT(alpha=0.3).merge(model, reference)
    live = model.state_dict()
    assert all(torch.equal(live[name], tensor) for name, tensor in merged.items())


def test_a_sweep_in_memory_restores_all_rows(disk):
    model = transformers.AutoModelForCausalLM.from_pretrained(disk / "untied-tuned")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    row = WiseFT().sweep(
        model,
        Reference.open(disk / "untied"),
        [0.0, 0.5, 1.0],
        lambda m: m.lm_head.weight[-1].tolist(),
    )
    assert row[0.0] == row[0.5] == row[1.0]
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_run_with_the_weights_before_resizing(disk):
    rows = [{"input_ids": [2, 7, 8, 27], "labels": [2, 7, 8, 27]}] * 8
    start = resized(FAMILIES["tied"](), TOKENS + 3)
    reference = Reference.open(disk / "tied")

    def tuned(recipe):
        run = Run(recipe, copy.deepcopy(start), rows, lr=1e-2, reference=reference, progress=False)
        train_loop(run)
        return run.finish().model.embed_tokens.weight.detach()

    with pytest.raises(ValueError, match=r"resized from 27 to 30 tokens.*Reference\.of"):
        tuned("recadam")
    plain, merged = tuned("standard"), tuned("wise-ft")
    assert torch.equal(merged[TOKENS:], plain[TOKENS:])
    old = reference["model.embed_tokens.weight"]
    assert torch.equal(merged[:TOKENS], torch.lerp(old, plain[:TOKENS], 0.5))
    assert not torch.equal(plain[:TOKENS], old)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory, disk):
    """Folders of LoRA adapters on resized models, by how the embeddings are trained."""
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    folder = tmp_path_factory.mktemp("adapters")
    for name, more in {
        "frozen": {},
        "trained": {"modules_to_save": ["embed_tokens", "lm_head"]},
        "some": {"trainable_token_indices": [TOKENS, TOKENS + 1]},
    }.items():
        model = transformers.AutoModelForCausalLM.from_pretrained(disk / "untied")
        config = peft.LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **more)
        adapted = peft.get_peft_model(resized(model, TOKENS + 3), config)
        with torch.no_grad():
            for p in (p for p in adapted.parameters() if p.requires_grad):
                p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        # It saves the embeddings too, because they are resized.
        save(adapted, folder / name, grown_tokenizer(), save_embedding_layers=True)
    return folder


@pytest.mark.parametrize("kind", ["frozen", "trained"])
def test_adapters_with_resized_embeddings(tmp_path, disk, adapters, kind):
    base, adapter = disk / "untied", adapters / kind
    report = measure(base, adapter, context_free=8, progress=False)
    assert report.drift.vocabulary == Vocabulary(TOKENS, TOKENS + 3, tuple(NEW))
    assert f"over the {TOKENS} tokens" in report.divergences[0].how
    rows = {row.name: row for row in report.drift.tensors}
    assert (rows["lm_head.weight"].distance > 0) == (kind == "trained")
    out = merge_on_disk(base, adapter, tmp_path / "out", WiseFT(1))
    merged = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert merged.config.vocab_size == TOKENS + 3
    ids = torch.tensor([[2, 7, 8, TOKENS, TOKENS + 2]])
    with Loader().open(adapter, base) as loaded, torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, loaded.model(ids).logits)


def test_the_predictions_of_adapters_of_some_tokens(disk, adapters):
    report = measure(
        disk / "untied", adapters / "some", drift=False, context_free=8, progress=False
    )
    assert f"over the {TOKENS} tokens" in report.divergences[0].how


def test_the_weights_of_adapters_of_some_tokens_are_refused(disk, adapters, capsys):
    for command in (["measure"], ["merge", "--out", str(adapters / "out")]):
        code = main([command[0], str(disk / "untied"), str(adapters / "some"), *command[1:]])
        assert code != 0
        assert "merge it into its model with PEFT's merge_and_unload" in capsys.readouterr().err


def test_the_command_line_says_once_what_is_new(tmp_path, disk, capsys):
    text = tmp_path / "words.txt"
    text.write_text(TEXT)
    tools = tmp_path / "tools.jsonl"
    tools.write_text(json.dumps({"prompt": "two plus <|tool|>", "completion": "four"}) + "\n")
    models = [str(disk / "tied"), str(disk / "tied-tuned")]
    out = tmp_path / "report"
    assert (
        main(["measure", *models, "--text", str(text), "--target", str(tools), "--out", str(out)])
        == 0
    )
    said = (out / "report.md").read_text()
    assert said.count("3 tokens are new") == 1
    report = holdfast.ForgettingReport.load(out / "report.json")
    assert report.drift.vocabulary.new == tuple(NEW)
    assert {d.name for d in report.divergences} == {"context-free", "tools"}
    assert report.split == ("tools",)
    assert "\ntools contains new tokens of the tuned model," in str(report.verdict())
    swept = ["--sweep", "0", "1", "--target", str(tools), "--out", str(tmp_path / "tools")]
    assert main(["merge", *models, *swept]) == 0
    told = (tmp_path / "tools" / "sweep.md").read_text()
    assert "No α is recommended: tools was read in pieces." in told

    capsys.readouterr()
    assert main(["merge", *models, "--alpha", "0.25", "--out", str(tmp_path / "merged")]) == 0
    assert "3 tokens are new (<|tool|>, <|end|> and <|x|>). The rows" in capsys.readouterr().out
    sweep = ["--sweep", "0", "0.5", "1", "--text", str(text), "--out", str(tmp_path / "sweep")]
    assert main(["merge", *models, *sweep]) == 0
    assert (tmp_path / "sweep" / "sweep.md").read_text().count("3 tokens are new") == 1
