import pytest
import torch

from holdfast import pad_collate

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
