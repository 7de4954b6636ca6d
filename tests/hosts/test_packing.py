"""Packed samples give the loss of the same samples in rows of their own."""

import random

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from holdfast import Run  # noqa: E402
from holdfast.hosts._packing import Packed, check_packing, pack  # noqa: E402
from holdfast.hosts.accelerate import AccelerateLoop, Accelerator  # noqa: E402
from holdfast.losses import IGNORED  # noqa: E402
from small import make_llama, make_tokenizer  # noqa: E402


def make_samples(count=9, seed=0):
    draw = random.Random(seed)
    samples = []
    for _ in range(count):
        ids = [draw.randrange(7, 27) for _ in range(draw.randrange(3, 12))]
        context = draw.randrange(0, len(ids) - 1)
        samples.append({"input_ids": ids, "labels": [IGNORED] * context + ids[context:]})
    return samples


@given(st.lists(st.integers(1, 12), max_size=40))
def test_every_sample_is_in_one_pack_that_has_room(lengths):
    packs = pack(lengths, 12)
    assert sorted(i for some in packs for i in some) == list(range(len(lengths)))
    assert all(0 < sum(lengths[i] for i in some) <= 12 for some in packs)
    used = sorted(sum(lengths[i] for i in some) for some in packs)
    assert len(used) < 2 or used[0] + used[1] > 12  # no two packs fit into one


def gradients(recipe, samples, room=None):
    """The loss and the gradients of the first update, with all samples in it."""
    torch.manual_seed(0)
    model = make_llama().double()
    size = len(samples)
    run = Run(
        recipe, model, samples, lr=1e-3, progress=False, cache=False, tokenizer=make_tokenizer(),
        visits=size, update_size=size,
    )  # fmt: skip
    if room:
        run.criterion.data = Packed(run.criterion.data, room, run.criterion.columns)
        assert len(run.criterion.data) < size
        size = len(run.criterion.data)
    loop = AccelerateLoop(Accelerator(cpu=True), run, batch_size=size)
    next(iter(loop))
    loss = loop.backward()
    return loss, {n: p.grad for n, p in run.model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    "recipe",
    [
        "standard",
        "flow",
        "recadam+flow",
        "holdfast",
        "distill",
        "tmkl",
        "lora",
        "dft",
        "talr",
        "eaft",
    ],
)
def test_the_loss_and_its_gradients_are_those_of_separate_samples(recipe):
    samples = make_samples()
    loss, found = gradients(recipe, samples)
    packed_loss, packed = gradients(recipe, samples, room=24)
    torch.testing.assert_close(packed_loss, loss, rtol=1e-6, atol=0)
    assert found.keys() == packed.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-5, atol=1e-9)


def test_a_model_that_mixes_samples_is_refused():
    check_packing(make_llama())
    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=30, hidden_size=16, num_hidden_layers=1)
    with pytest.raises(ValueError, match="MambaForCausalLM takes no positions"):
        check_packing(transformers.MambaForCausalLM(config))
    model = make_llama()
    inner = model.model.forward
    model.model.forward = lambda *args, **kwargs: inner(*args, **{**kwargs, "position_ids": None})
    with pytest.raises(ValueError, match="lets packed samples see each other"):
        check_packing(model)
