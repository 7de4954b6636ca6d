"""A column through collate functions that know nothing of it."""

import pickle

import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from holdfast.columns import keeping, take_column, with_column
from holdfast.data import pad_collate

TOKENS = [
    {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weight": [0.0, 0.5, 0.25]},
    {"input_ids": [8], "labels": [8], "weight": [0.75]},
]
RIGHT = torch.tensor([[0.0, 0.5, 0.25], [0.75, 0.0, 0.0]])
LEFT = torch.tensor([[0.0, 0.5, 0.25], [0.0, 0.0, 0.75]])


def tokenizer(side="right"):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{i}": i for i in range(10)} | {"[PAD]": 10}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", padding_side=side
    )


def strict(samples):
    """A collate function that knows its columns, and no others."""
    assert all(set(s) == {"x"} for s in samples)
    return {"x": torch.tensor([s["x"] for s in samples])}


def test_mappings():
    batch = keeping(strict, "weight")([{"x": 1, "weight": 0.5}, {"x": 2, "weight": 2}])
    assert batch["weight"].tolist() == [0.5, 2.0]
    assert batch["x"].tolist() == [1, 2]


@pytest.mark.parametrize("of", [tuple, list])
def test_tuples(of):
    samples = [of((torch.ones(2), 0, 0.5)), of((torch.zeros(2), 1, 0.25))]
    batch = keeping(default_collate, "weight")(samples)
    assert isinstance(batch, tuple)
    x, y, weight = batch
    assert x.shape == (2, 2)
    assert y.tolist() == [0, 1]
    assert weight.tolist() == [0.5, 0.25]
    rest, taken = take_column(batch, "weight")
    assert taken is weight
    assert len(rest) == 2


def test_without_a_column_nothing_is_wrapped():
    assert keeping(strict) is strict


def test_vectors_are_stacked():
    samples = [{"x": i, "z": torch.full((3,), float(i), dtype=torch.float64)} for i in range(2)]
    batch = keeping(strict, "z")(samples)
    assert batch["z"].tolist() == [[0.0] * 3, [1.0] * 3]
    assert batch["z"].dtype == torch.float64
    several = [{"labels": torch.tensor([0, 1, 1]), "z": [0.5, 1.0, 2.0]}] * 2
    assert keeping(default_collate, "z")(several)["z"].tolist() == [[0.5, 1.0, 2.0]] * 2


def test_tokens_are_padded_like_their_labels():
    batch = keeping(pad_collate, "weight")(TOKENS)
    assert torch.equal(batch["weight"], RIGHT)
    assert batch["labels"].shape == RIGHT.shape


@pytest.mark.parametrize(("side", "expected"), [("right", RIGHT), ("left", LEFT)])
def test_transformers_collators_for_tokens(side, expected):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    samples = [{**s, "attention_mask": [1] * len(s["input_ids"])} for s in TOKENS]
    for kind in ("DataCollatorForTokenClassification", "DataCollatorForSeq2Seq"):
        batch = keeping(getattr(transformers, kind)(tokenizer(side)), "weight")(samples)
        assert torch.equal(batch["weight"], expected)
        where = batch["labels"] != -100
        assert torch.equal(batch["weight"] > 0, where)
        wider = getattr(transformers, kind)(tokenizer(side), pad_to_multiple_of=8)
        batch = keeping(wider, "weight")(samples)
        assert torch.equal(batch["weight"] > 0, batch["labels"] != -100)


def test_labels_that_a_collator_makes():
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    collate = transformers.DataCollatorForLanguageModeling(tokenizer("left"), mlm=False)
    samples = [
        {
            "input_ids": s["input_ids"],
            "attention_mask": [1] * len(s["labels"]),
            "weight": s["weight"],
        }
        for s in TOKENS
    ]
    assert torch.equal(keeping(collate, "weight")(samples)["weight"], LEFT)


def test_transformers_padding_with_a_number_a_sample():
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    samples = [
        {
            "input_ids": s["input_ids"],
            "attention_mask": [1] * len(s["labels"]),
            "label": i,
            "w": 0.5 + i,
        }
        for i, s in enumerate(TOKENS)
    ]
    batch = keeping(transformers.DataCollatorWithPadding(tokenizer()), "w")(samples)
    assert isinstance(batch, transformers.BatchEncoding)
    assert batch["w"].tolist() == [0.5, 1.5]
    assert batch["labels"].tolist() == [0, 1]
    rest, _ = take_column(batch, "w")
    assert set(rest) == {"input_ids", "attention_mask", "labels"}


def test_it_goes_to_the_workers_of_a_loader():
    data = with_column([(torch.ones(1), i) for i in range(6)], [i / 4 for i in range(6)], "weight")
    collate = pickle.loads(pickle.dumps(keeping(default_collate, "weight")))
    loader = DataLoader(data, 3, collate_fn=collate, num_workers=1, multiprocessing_context="spawn")
    assert [batch[2].tolist() for batch in loader] == [[0.0, 0.25, 0.5], [0.75, 1.0, 1.25]]


def test_a_table_with_a_transform_is_wrapped():
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    table = datasets.Dataset.from_dict({"raw": [1, 2]})
    data = with_column(table.with_transform(lambda rows: {"x": rows["raw"]}), [0.5, 0.25], "weight")
    assert data[1] == {"x": 2, "weight": 0.25}


class TestRefused:
    def test_a_column_that_was_dropped(self):
        with pytest.raises(
            ValueError, match=r"sample of x has no 'weight'.*remove_unused_columns="
        ):
            keeping(strict, "weight")([{"x": 1}])
        with pytest.raises(ValueError, match="the sample has no 'weight'"):
            keeping(default_collate, "weight")([(torch.ones(2), 0)])

    def test_a_batch_without_it(self):
        with pytest.raises(ValueError, match=r"batch of x has no 'weight'.*keeping\(collate"):
            take_column({"x": 1}, "weight")
        with pytest.raises(ValueError, match="the batch has no 'weight'"):
            take_column((torch.ones(2), torch.ones(2)), "weight")

    def test_tokens_that_were_cut(self):
        def cut(samples):
            return {"labels": torch.tensor([s["labels"][:2] for s in samples])}

        with pytest.raises(ValueError, match=r"\[3\] values for labels of shape \(1, 2\)"):
            keeping(cut, "weight")(TOKENS[:1])

    def test_samples_and_batches_of_another_kind(self):
        with pytest.raises(TypeError, match="must be a mapping or a tuple to carry 'w'"):
            with_column(torch.ones(2, 3), [1, 2], "w")[0]
        with pytest.raises(TypeError, match="batches must be mappings or tuples"):
            keeping(lambda samples: torch.ones(2), "w")([{"x": 1, "w": 1}])

    def test_the_wrong_number(self):
        with pytest.raises(ValueError, match="got 1 values for 2 samples"):
            with_column(TOKENS, [1], "w")
