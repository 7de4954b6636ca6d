import pytest
import torch
from torch.utils.data import default_collate

from holdfast import pad_collate
from holdfast.data import as_source

IDS = list(range(12))


class TestLabelsOfASample:
    def test_a_vector_of_floats_is_not_one_label_per_token(self):
        rows = [[1.0, 1.0, 0.0], [0.0, 1.0, 0.0]]
        batch = pad_collate([{"input_ids": IDS, "labels": labels} for labels in rows])
        assert torch.equal(batch["labels"], torch.tensor(rows))

    def test_vectors_of_different_lengths_are_not_padded(self):
        rows = [[1.0, 1.0, 0.0], [0.0, 1.0]]
        with pytest.raises(ValueError, match="two samples have 3 and 2 labels"):
            pad_collate([{"input_ids": IDS, "labels": labels} for labels in rows])

    @pytest.mark.parametrize("labels", [[1, 1, 0], []])
    def test_integers_are_one_per_token(self, labels):
        with pytest.raises(ValueError, match=f"a sample has {len(labels)} labels for 12 input_ids"):
            pad_collate([{"input_ids": IDS, "labels": labels}])


def test_batches_of_tokens_are_filled_up_to_a_number_of_tokens():
    samples = [{"input_ids": [1] * n} for n in (8, 8, 4, 4, 4, 4, 2, 2)]
    source = as_source(samples, None, 1)
    assert [len(indices) for indices, _ in source] == [1, 1, 2, 2, 2]
    source.tokens = 16
    assert [len(indices) for indices, _ in source] == [2, 4, 2]
    images = as_source([(torch.zeros(3, 2, 2), 0)] * 4, default_collate, 2)
    images.tokens = 16
    assert [len(indices) for indices, _ in images] == [2, 2]


def test_lists_of_numbers_are_padded_as_they_are():
    batch = pad_collate([{"input_ids": [1, 2], "x": [1, 2.5]}, {"input_ids": [3], "x": [2, 3]}])
    assert batch["x"].tolist() == [[1, 2.5], [2, 3]]
    assert batch["input_ids"].tolist() == [[1, 2], [3, 0]]
    batch["input_ids"][0, 0] = 9  # its memory is its own
