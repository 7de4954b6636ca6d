import pytest
import torch

from golden.fapm import fapm
from holdfast import FAPM, Recipe
from holdfast._torch.merging import Slice
from holdfast.methods.fapm import score
from methods.merges import WHERE, assert_equals, vectors


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0, 0.001])
def test_float64_equals_its_definition(keep):
    base, [tuned] = vectors()
    merged = FAPM(keep).merged(WHERE, base, [tuned])
    assert_equals(merged, fapm(base.tolist(), tuned.tolist(), keep))
    assert (merged != base).sum() == max(1, int(keep * len(base)))


def test_a_large_change_of_a_small_weight_is_undone_first():
    base, tuned = torch.tensor([2.0, 0.01, 2.0, 2.0]), torch.tensor([2.5, 3.0, 2.1, 2.2])
    assert torch.equal(FAPM(0.75).merged(WHERE, base, [tuned]), torch.tensor([2.5, 0.01, 2.1, 2.2]))


def test_weights_that_were_zero():
    base, tuned = torch.tensor([0.0, 1.0, 0.0]), torch.tensor([5.0, 1.1, 0.0])
    scores = score(Slice(0, base, [tuned]), mean=1 / 3)
    assert scores.tolist() == pytest.approx([-float("inf"), 0.1 * 2 / 3, 0])
    assert FAPM(0.4).merged(WHERE, base, [tuned]).tolist() == pytest.approx([0, 1.1, 0])
    zeros, new = torch.zeros(4), torch.arange(4.0)  # a bias that starts at 0
    assert FAPM(1.0).merged(WHERE, zeros, [new]).equal(new)
    assert FAPM(0.5).merged(WHERE, zeros, [new]).isfinite().all()


def test_lora_is_refused():
    from holdfast import LoRA

    with pytest.raises(ValueError, match="FAPM needs the effective weights"):
        Recipe(trainable=LoRA(), merging=FAPM())


@pytest.mark.parametrize("bad", [0, 1.5, "x"])
def test_refused(bad):
    with pytest.raises((ValueError, TypeError), match="keep must be"):
        FAPM(bad)
