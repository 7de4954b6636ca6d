"""Two models in, a report out."""

import json
import math

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast  # noqa: E402
from holdfast.cli import main  # noqa: E402
from holdfast.evaluate.classify import Classification, HeadAgreement  # noqa: E402
from holdfast.evaluate.kl import ContextFreeKL  # noqa: E402
from holdfast.evaluate.skills import skills  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from holdfast.report.command import command  # noqa: E402
from holdfast.report.next_step import words_of  # noqa: E402
from small import make_llama, make_tokenizer, noisy, save  # noqa: E402

TEXT = " ".join(["the cat sat on the mat . a dog ran and two plus three is five ."] * 20)
ROWS = [{"question": "two plus two is", "answer": "four"}, {"question": "the", "answer": "cat ."}]
CHOICES = [{"goal": "the cat sat on", "choices": ["the mat", "two plus"], "label": 0}] * 3


@pytest.fixture
def folders(tmp_path):
    """A base and a tuned causal model, and files to test them on."""
    base = make_llama()
    save(base, tmp_path / "base", make_tokenizer())
    save(noisy(base), tmp_path / "tuned", make_tokenizer())
    (tmp_path / "text.txt").write_text(TEXT)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "choices.jsonl").write_text("\n".join(map(json.dumps, CHOICES)))
    return tmp_path


def test_everything_at_once(folders):
    report = holdfast.measure(
        folders / "base", folders / "tuned", text=[folders / "text.txt"],
        data=[folders / "choices.jsonl"], target=folders / "rows.jsonl", context_free=8,
        progress=False,
    )  # fmt: skip
    assert [(s.name, s.metric, s.role) for s in report.scores] == [
        ("text", "perplexity", "retained"),
        ("choices", "accuracy", "retained"),
        ("rows", "nll", "target"),
        ("rows", "exact_match", "target"),
    ]
    assert [d.name for d in report.divergences] == ["context-free", "rows"]
    assert all(d.kl.value > 0 for d in report.divergences)
    wanted = sum(p.numel() for p in make_llama().parameters()) ** 0.5 * 0.05
    assert report.drift.total.distance == pytest.approx(wanted, rel=0.05)
    assert report.notes == ()
    assert holdfast.ForgettingReport.from_json(report.to_json()) == report


def test_the_same_model_has_forgotten_nothing(folders):
    report = holdfast.measure(
        folders / "base", folders / "base", text=[folders / "text.txt"],
        data=[folders / "choices.jsonl"], target=folders / "rows.jsonl", context_free=8,
        progress=False,
    )  # fmt: skip
    assert report.drift.total.distance == 0
    assert all((d.kl.value, d.kl.low, d.kl.high) == (0, 0, 0) for d in report.divergences)
    assert all(s.change.value == 0 for s in report.scores)
    assert report.verdict().forgotten == "nothing"
    assert "othing" in report.verdict().headline


def test_a_base_alone(folders):
    tests = {"text": [folders / "text.txt"], "target": folders / "rows.jsonl", "progress": False}
    off = {"drift": False, "context_free": 0, "kl_samples": 0}
    (alone,) = holdfast.measure_many(folders / "base", [("base", None)], **tests, **off)
    assert (alone.drift, alone.divergences) == (None, ())
    both = holdfast.measure(folders / "base", folders / "tuned", **tests, **off)
    assert [s.before for s in alone.scores] == [s.before for s in both.scores]
    assert all(s.change.value == 0 for s in alone.scores)


def test_models_in_memory_stay_as_they_are():
    base = make_llama().train()
    tuned = noisy(base).train()
    report = holdfast.measure(
        base,
        tuned,
        text={"t": TEXT},
        loader=Loader(tokenizer=make_tokenizer()),
        context_free=4,
        progress=False,
    )
    assert base.training
    assert tuned.training
    assert (report.base, report.scores[0].name) == ("LlamaForCausalLM", "t")


def test_one_model_is_in_memory_at_a_time(folders, monkeypatch):
    import gc
    import weakref

    alive, load = [], Loader.load

    def watched(self, *args):
        gc.collect()
        assert [m for m in alive if m() is not None] == []
        model = load(self, *args)
        alive.append(weakref.ref(model))
        return model

    monkeypatch.setattr(Loader, "load", watched)
    holdfast.measure(folders / "base", folders / "tuned", context_free=2, progress=False)
    assert len(alive) == 2


def test_a_lora_adapter_sits_on_its_base(folders):
    peft = pytest.importorskip("peft", reason="the peft extra is not installed")
    base = transformers.LlamaForCausalLM.from_pretrained(folders / "base")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(base, config)
    model.save_pretrained(folders / "adapter")
    merged = model.merge_and_unload()
    save(merged, folders / "merged", make_tokenizer())
    options = {"text": [folders / "text.txt"], "context_free": 4, "progress": False}
    adapter = holdfast.measure(folders / "base", folders / "adapter", **options)
    whole = holdfast.measure(folders / "base", folders / "merged", **options)
    assert adapter.drift.total.distance == pytest.approx(whole.drift.total.distance, rel=1e-5)
    assert adapter.scores[0].after.value == pytest.approx(whole.scores[0].after.value, rel=1e-5)
    assert adapter.divergences[0].kl.value == pytest.approx(whole.divergences[0].kl.value, rel=1e-4)
    assert adapter.drift.total.distance > 0


def test_sharded_checkpoints(folders):
    save(noisy(make_llama()), folders / "shards", make_tokenizer(), max_shard_size="10KB")
    assert len(list((folders / "shards").glob("*.safetensors"))) > 1
    one = holdfast.measure(folders / "base", folders / "tuned", context_free=4, progress=False)
    two = holdfast.measure(folders / "base", folders / "shards", context_free=4, progress=False)
    assert one.drift == two.drift
    kl = [report.divergences[0].kl.value for report in (one, two)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-6)  # other addresses, other rounding


def make_bert(cls, **more):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=32, pad_token_id=0, **more,
    )  # fmt: skip
    return cls(config).eval()


def test_masked_models(tmp_path):
    tokenizer = make_tokenizer(cls_token="[CLS]", sep_token="[SEP]")
    base = make_bert(transformers.BertForMaskedLM)
    save(base, tmp_path / "base", tokenizer)
    save(noisy(base, 0.3), tmp_path / "tuned", tokenizer)
    (tmp_path / "t.txt").write_text(TEXT)
    report = holdfast.measure(
        tmp_path / "base", tmp_path / "tuned", text=[tmp_path / "t.txt"],
        target=tmp_path / "t.txt", progress=False,
    )  # fmt: skip
    text, target = report.scores
    assert text.before == target.before
    words = len(TEXT.split())
    assert text.before.n == -(-words // 30)  # windows of 32 with [CLS] and [SEP]
    (kl,) = report.divergences
    assert kl.per == "masked token"
    assert 0.1 < kl.predictions / words < 0.2
    assert kl.kl.value > 0
    assert "does not generate texts" in report.notes[0]


def test_classifiers_of_texts(tmp_path):
    tokenizer = make_tokenizer(cls_token="[CLS]", sep_token="[SEP]")
    base = make_bert(transformers.BertForSequenceClassification, num_labels=2)
    tuned = noisy(base, 0.3)
    rows = [
        {"sentence1": "the cat sat", "sentence2": "a dog ran", "label": 0},
        {"sentence1": "two plus two", "sentence2": "is four", "label": 1},
    ] * 4
    save(base, tmp_path / "base", tokenizer), save(tuned, tmp_path / "tuned", tokenizer)
    report = holdfast.measure(
        tmp_path / "base", tmp_path / "tuned", target={"pairs": rows}, progress=False
    )
    (score, loss), (kl,) = report.scores, report.divergences
    assert (score.metric, score.before.n, kl.per) == ("accuracy", 8, "sample")
    with torch.inference_mode():
        batch = tokenizer(
            [r["sentence1"] for r in rows], [r["sentence2"] for r in rows],
            padding=True, return_tensors="pt",
        )  # fmt: skip
        logits = [model(**batch).logits for model in (base, tuned)]
    labels = torch.tensor([r["label"] for r in rows])
    for estimate, said in zip((score.before, score.after), logits, strict=True):
        assert estimate.value == pytest.approx((said.argmax(-1) == labels).float().mean().item())
    for estimate, said in zip((loss.before, loss.after), logits, strict=True):
        known = torch.nn.functional.cross_entropy(said, labels).item()
        assert estimate.value == pytest.approx(known, rel=1e-5)


class Vision(torch.nn.Module):
    """A body with BatchNorm and a head."""

    def __init__(self, classes, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.body = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU(),
            torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
        )  # fmt: skip
        self.classifier = torch.nn.Linear(8, classes)

    def forward(self, x):
        return self.classifier(self.body(x))


def test_what_the_pretrained_head_still_sees():
    base, tuned = Vision(5), Vision(3, seed=1)
    tuned.body.load_state_dict(base.body.state_dict())
    with torch.no_grad():  # the statistics of the new data; the pretrained ones must be used
        tuned.body[1].running_mean.add_(5.0)
    images = torch.randn(20, 3, 6, 6)
    labels = torch.arange(20) % 5
    pairs = list(zip(images, labels, strict=True))
    task = Classification("imagenet", torch.utils.data.TensorDataset(images, labels))
    report = holdfast.measure(
        base, tuned, probes=[HeadAgreement(task, labeled=True)], progress=False
    )
    agreement, accuracy = report.scores
    assert (agreement.before.value, agreement.after.value) == (1, 1)
    assert accuracy.change.value == 0
    with torch.no_grad():
        for p in tuned.body.parameters():
            p.add_(torch.randn_like(p))
    report = holdfast.measure(base, tuned, probes=[HeadAgreement(task)], progress=False)
    assert report.scores[0].after.value < 1
    assert report.drift.only_tuned or report.drift.only_base  # the other head
    assert tuned.classifier.out_features == 3
    assert len(pairs) == 20


def test_the_drift_alone_needs_no_config(tmp_path):
    from safetensors.torch import save_file

    save_file({"w": torch.zeros(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.ones(3)}, tmp_path / "b.safetensors")
    report = holdfast.measure(
        tmp_path / "a.safetensors", tmp_path / "b.safetensors", progress=False
    )
    assert report.drift.total.distance == pytest.approx(3**0.5)
    assert "no config.json" in report.notes[0]


def test_the_command(folders, capsys):
    arguments = ["measure", str(folders / "base"), str(folders / "tuned"), "--context-free", "4"]
    arguments += ["--text", str(folders / "text.txt"), "--out", str(folders / "out")]
    assert main([*arguments, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    report = holdfast.ForgettingReport.load(folders / "out" / "report.json")
    assert json.loads(report.to_json()) == printed
    assert (folders / "out" / "report.html").read_text().lower().startswith("<!doctype html>")
    assert main(arguments) == 0
    assert "text" in capsys.readouterr().out


def test_a_report_gives_the_same_tests_but_no_text_and_no_trust(folders):
    free = ContextFreeKL(2, 4, seed=7)
    loader = Loader("cpu", torch.float32, max_length=16, allow_pickle=True, trust_remote_code=True)
    models = folders / "base", folders / "tuned"
    given = {"loader": loader, "limit": 3, "context_free": free, "progress": False}
    tests = {
        "text": {"mine": "the secret cat"}, "data": [folders / "text.txt"],
        "probes": skills(2, 4, seed=7),
    }  # fmt: skip
    report = holdfast.measure(*models, drift=False, **tests, **given)
    line = report.settings["command"]
    assert "secret" not in report.to_json() + report.to_html()
    assert line == (
        f"holdfast measure {models[0]} {models[1]} --text FILE --retained {folders}/text.txt "
        "--limit 3 --context-free 2 --skills --seed 7 --test-max-length 16 --no-drift "
        "--dtype float32 --device cpu"
    )
    names, options = words_of(report)
    assert command("measure", *names, **options) == line
    own = holdfast.measure(*models, probes=[tests["probes"][0]], **given)
    assert "command" not in own.settings  # the command line has no such test


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (["--text", "nothing.txt"], "no such file: nothing.txt"),
        (["--text", "empty.txt"], "empty.txt is empty"),
        (["--retained", "bad.jsonl"], "bad.jsonl, line 2 is not JSON"),
        (["--retained", "odd.jsonl"], "has the columns x, which fit no test"),
        (["--limit", "0"], "limit must be at least 1"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(folders, capsys, monkeypatch, change, words):
    monkeypatch.chdir(folders)
    (folders / "empty.txt").write_text(" \n")
    (folders / "bad.jsonl").write_text('{"a": 1}\n{"a": \n')
    (folders / "odd.jsonl").write_text('{"x": 1}\n')
    assert main(["measure", "base", "tuned", "--out", "out", *change]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert not (folders / "out").exists()


def test_bad_models_are_one_sentence(folders, capsys, monkeypatch):
    monkeypatch.chdir(folders)
    save(make_bert(transformers.BertModel), folders / "bert")
    (folders / "pickled").mkdir()
    torch.save(make_llama().state_dict(), folders / "pickled" / "pytorch_model.bin")
    make_llama().config.save_pretrained(folders / "pickled")
    save(make_llama(), folders / "short")
    whole = (folders / "short" / "model.safetensors").read_bytes()
    (folders / "short" / "model.safetensors").write_bytes(whole[:-100])
    for tuned, words in [
        ("bert", "base"), ("pickled", "pickle"), ("short", "model.safetensors"), ("gone", "gone"),
    ]:  # fmt: skip
        assert main(["measure", "base", tuned, "--out", "out"]) == 2, tuned
        said = capsys.readouterr().err
        assert words in said
        assert "Traceback" not in said
        assert not (folders / "out").exists()
    assert main(["measure", "base", "pickled", "--allow-pickle", "--context-free", "2"]) == 0


def test_weights_that_are_not_numbers_are_named(folders):
    broken = make_llama()
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    save(broken, folders / "broken", make_tokenizer())
    report = holdfast.measure(
        folders / "base", folders / "broken", text=[folders / "text.txt"], context_free=2,
        progress=False,
    )  # fmt: skip
    assert report.drift.not_finite == ("model.layers.1.mlp.up_proj.weight",)
    assert "NaN" in report.to_markdown() or "not finite" in report.to_markdown()


@pytest.mark.parametrize("drift", [True, False])
def test_a_model_that_predicts_nan_is_told_first(drift, folders):
    broken = make_llama()
    with torch.no_grad():
        broken.lm_head.weight.fill_(3e38)  # finite, but not its logits
    save(broken, folders / "nan", make_tokenizer())
    rows = [{"question": "the cat", "choices": ["sat", "two plus"], "label": 0}] * 20
    options = {"data": {"c": rows}, "context_free": 2, "drift": drift, "progress": False}
    said = holdfast.measure(folders / "base", folders / "nan", **options).verdict()
    assert said.headline == "The tuned model gives NaN or infinity on c."
    assert said.forgotten == "much"
    assert "No measurable" not in str(said)
    said = holdfast.measure(folders / "nan", folders / "base", **options).verdict()
    assert said.headline == "The base model gives NaN or infinity on c."
    assert said.forgotten == "unknown"


@pytest.mark.parametrize("role", ["retained", "target"])
def test_a_classifier_that_predicts_nan(role):
    def bert():
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_labels=3,
        )  # fmt: skip
        return transformers.BertForSequenceClassification(config).eval()

    rows = [{"text": "the cat sat on", "label": i % 3} for i in range(12)]
    base, broken = bert(), bert()
    with torch.no_grad():
        broken.classifier.weight.fill_(float("nan"))
    task = Classification("cls", rows, role=role)
    probes = [task] if role == "target" else [task, HeadAgreement(task, labeled=True)]
    report = holdfast.measure(
        base, broken, probes=probes, loader=Loader(tokenizer=make_tokenizer()), progress=False
    )
    plain, *rest = report.scores
    assert len(rest) == (1 if role == "target" else 2)  # its loss; the pretrained head's scores
    assert math.isnan(plain.after.value)
    if role == "target":
        assert (rest[0].metric, math.isnan(rest[0].after.value)) == ("loss", True)
    else:
        assert all(score.change.value == 0 for score in rest)  # the body is the same
        with torch.no_grad():
            broken.bert.pooler.dense.weight.fill_(float("nan"))
        report = holdfast.measure(
            base, broken, probes=probes, loader=Loader(tokenizer=make_tokenizer()), progress=False
        )
        assert all(math.isnan(score.after.value) for score in report.scores)
    assert report.verdict().headline.startswith("The tuned model is broken")
