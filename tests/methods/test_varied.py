"""Variations of inputs: valid, random, and the same in any batch."""

import pytest
import torch

from holdfast.methods import _varied
from holdfast.methods._varied import varied

PAD = 99


def make_tokens(lengths, width=None, left=False):
    """Row i counts up from 100·(i + 1), so that places can be read off."""
    width = width or max(lengths)
    ids, mask = torch.full((len(lengths), width), PAD), torch.zeros(len(lengths), width)
    for i, n in enumerate(lengths):
        where = slice(width - n, width) if left else slice(0, n)
        ids[i, where], mask[i, where] = 100 * (i + 1) + torch.arange(n), 1
    return {"input_ids": ids, "attention_mask": mask.long(), "token_type_ids": ids * 0 + 1}


def piece_of(out, row):
    return out["input_ids"][row][out["attention_mask"][row] == 1].tolist()


@pytest.mark.parametrize("left", [False, True])
def test_a_piece_of_each_sequence_with_its_ends(left):
    lengths = [1, 2, 3, 5, 6, 20, 33]
    inputs, seen = make_tokens(lengths, left=left), set()
    for update in range(200):
        out = varied(inputs, 0, update, PAD)
        assert set(out) == {"input_ids", "attention_mask"}
        assert out["input_ids"].shape == inputs["input_ids"].shape
        assert (out["input_ids"][out["attention_mask"] == 0] == PAD).all()
        for row, n in enumerate(lengths):
            piece = piece_of(out, row)
            assert piece[0] == 100 * (row + 1)
            assert piece[-1] == 100 * (row + 1) + n - 1
            inner = piece[1:-1]
            assert [token - inner[0] for token in inner] == list(range(len(inner)))
            assert min(3, max(0, n - 2)) <= len(inner) <= max(0, n - 2)
            assert all(100 * (row + 1) < token < 100 * (row + 1) + n - 1 for token in inner)
        seen.add((piece_of(out, 5)[1], len(piece_of(out, 5))))
    assert len({start for start, _ in seen}) >= 12  # of 16
    assert len({length for _, length in seen}) >= 14  # of 16


def test_without_a_mask_padding_is_recognized():
    inputs = make_tokens([4, 9])
    bare = {"input_ids": inputs["input_ids"]}
    for name, tensor in varied(inputs, 0, 1, PAD).items():
        assert torch.equal(varied(bare, 0, 1, PAD)[name], tensor)
    assert varied(bare, 0, 1)["attention_mask"].shape == (2, 9)


def test_a_sequence_is_varied_alike_in_any_batch():
    whole = varied(make_tokens([12, 30, 7]), 0, 5, PAD)
    one = make_tokens([12, 30, 7], width=41, left=True)
    for row in range(3):
        alone = varied({n: t[row : row + 1] for n, t in one.items()}, 0, 5, PAD)
        assert piece_of(alone, 0) == piece_of(whole, row)


def make_images(n=6, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 9, 12, generator=generator, dtype=torch.float64).to(dtype)


def test_an_image_is_varied_alike_in_any_batch():
    x = make_images()
    whole = varied(x, 0, 3)
    for i in range(len(x)):
        torch.testing.assert_close(varied(x[i : i + 1], 0, 3)[0], whole[i], rtol=0, atol=1e-12)
    layout = x.contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(varied(layout, 0, 3), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("inputs", [make_images(), make_tokens([40] * 6)])
def test_it_depends_on_the_seed_the_update_and_the_sample_only(inputs):
    def first(seed, update):
        torch.manual_seed(seed + update)
        out = varied(inputs, seed, update)
        return out if isinstance(out, torch.Tensor) else out["input_ids"]

    state = torch.get_rng_state()
    varied(inputs, 0, 1)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first(0, 1), first(0, 1))
    assert not torch.equal(first(0, 1), first(0, 2))
    assert not torch.equal(first(0, 1), first(1, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_images_keep_their_shape_dtype_and_scale(dtype):
    x = make_images(200, dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = varied(x, 0, 1)
    assert out.shape == x.shape
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert 0.3 < out.double().std() / x.double().std() < 1.5
    assert not out.requires_grad
    black = varied(torch.zeros_like(x), 0, 1)
    assert torch.equal(black, torch.zeros_like(x))


def test_any_normalization_of_the_pixels():
    x, keys = make_images(), torch.arange(6)
    torch.testing.assert_close(
        _varied._view(255 * x + 128, keys), 255 * _varied._view(x, keys) + 128
    )


def test_every_view_differs_in_geometry_and_channels():
    x, keys = make_images(1).expand(400, -1, -1, -1), torch.arange(400)
    views = _varied._view(x, keys)
    assert len({tuple(v.flatten()[:3].tolist()) for v in views}) == 400
    ramp = torch.stack([torch.full((8, 8), float(c)) for c in range(3)])[None].expand(
        400, -1, -1, -1
    )
    order = _varied._view(ramp, keys).mean((2, 3)).argsort(1)
    assert len({tuple(row.tolist()) for row in order}) == 6


def test_the_numbers_are_those_of_splitmix64():
    keys, mask = torch.tensor([0, 1, -5, 2**62]), (1 << 64) - 1
    found = _varied._uniform(keys, 4)
    for key, row in zip(keys.tolist(), found.tolist(), strict=True):
        state = key & mask
        for number in row:
            state = (state + 0x9E3779B97F4A7C15) & mask
            z = state
            z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
            z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
            z ^= z >> 31
            assert number == (z >> 40) / 2**24
    many = _varied._uniform(torch.arange(2000), 5)
    assert (many.mean(0) - 0.5).abs().max() < 0.03
    assert torch.corrcoef(many.T).fill_diagonal_(0).abs().max() < 0.08


@pytest.mark.parametrize(
    ("inputs", "what"),
    [
        (torch.zeros(2, 5), r"float32 \(2, 5\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), "uint8"),
        ({"a": torch.zeros(2, 3, 4, 4), "b": torch.zeros(2, 3, 4, 4)}, "a float32"),
        (["text"], "list"),
    ],
)
def test_other_inputs_are_refused(inputs, what):
    with pytest.raises(ValueError, match=f"{what}.*inputs='target'"):
        varied(inputs, 0, 1)
