"""Texts that ride along in a model's own call: the same sums as in two calls, with one."""

import copy
from functools import partial

import pytest
import torch
import transformers
from torch import nn

from _torch.test_head_loss import make_teachers
from heads import (
    LEAN,
    AddsToItsLogits,
    AnotherCurve,
    Headless,
    assert_same,
    exact,
    gpt2,
    gradients,
    small,
)
from holdfast._torch import ride
from holdfast._torch.head_loss import divergence_beside, replay_divergence
from holdfast._torch.teachers import KeptTokens
from matrices import sampled
from ranks import run_on_ranks
from small import make_llama

SHAPES = {"longer texts": 5, "shorter texts": 11}


@pytest.fixture(autouse=True)
def _any_padding(monkeypatch):
    monkeypatch.setattr(ride, "_PADDING", 9.0)


def make_texts(seed=1, rows=3, length=8):
    torch.manual_seed(seed)
    ids = torch.randint(4, 30, (rows, length))
    mask = torch.ones_like(ids)
    mask[-1, length - 2 :] = 0
    where = mask.bool() & (torch.rand(rows, length) < 0.8)
    teacher = make_teachers(where)["top"]
    return {
        "inputs": {"input_ids": ids, "attention_mask": mask},
        "where": where,
        "teacher": teacher,
    }


def make_target(length=11, rows=4, left=False):
    torch.manual_seed(5)
    ids = torch.randint(4, 30, (rows, length))
    mask = torch.ones_like(ids)
    mask[0, (slice(0, 2) if left else slice(-2, None))] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def rows_of_calls(model):
    """The number of rows in each call of the body, as they come."""
    seen = []
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    inner.base_model.register_forward_hook(
        lambda module, args, given, out: seen.append(len(out.last_hidden_state)), with_kwargs=True
    )
    layers = [m for m in inner.modules() if type(m).__name__.endswith(("DecoderLayer", "Block"))]
    layers[0].register_forward_pre_hook(lambda module, args: seen.append(-len(args[0])))
    return seen


def both(model, target, texts, **options):
    """A target's outputs and its loss with half of a divergence: in one call, and in two."""
    with divergence_beside(model, **texts, **options) as divergence:
        outputs = model(**target)
        one = outputs.loss + 0.5 * divergence()
    alone = model(**target)
    two = alone.loss + 0.5 * replay_divergence(model, **texts)
    return outputs, one, alone, two


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", LEAN)
def test_one_call_equals_two(name, shape, left):
    model, texts = exact(LEAN[name]()), make_texts()
    target = make_target(SHAPES[shape], left=left)
    replay_divergence(model, **texts)
    seen = rows_of_calls(model)
    outputs, one, alone, two = both(model, target, texts, chunk=90)
    assert seen == [-7, 4, -4, 4, -3, 3]  # all rows in the layers, the target's after the body
    torch.testing.assert_close(outputs.logits, alone.logits, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(outputs.loss, alone.loss, atol=1e-12, rtol=0)
    torch.testing.assert_close(one, two, atol=1e-10, rtol=0)
    assert_same(gradients(model, one), gradients(model, two))


def test_a_loss_of_the_users_own_and_a_target_without_a_mask():
    model, texts = exact(make_llama()), make_texts()
    target = make_target() | {"num_items_in_batch": torch.tensor(7), "use_cache": False}
    del target["attention_mask"]
    seen = []

    def loss_function(logits, labels, vocab_size, **more):
        seen.append((logits.shape, labels.shape, more["num_items_in_batch"].item()))
        return logits.square().mean()

    model.loss_function = loss_function
    _, one, _, two = both(model, target, texts)
    assert seen == [((4, 11, 30), (4, 11), 7)] * 2
    torch.testing.assert_close(one, two, atol=1e-10, rtol=0)


class Fused(nn.Module):
    """A model that uses the weights of its output layer without calling it, as Liger does."""

    def __init__(self):
        super().__init__()
        self.model = make_llama()
        self.config, self.base_model = self.model.config, self.model.model

    def get_output_embeddings(self):
        return self.model.lm_head

    def forward(self, input_ids, attention_mask=None, labels=None):
        states = self.base_model(input_ids, attention_mask=attention_mask).last_hidden_state
        if labels is None:
            return self.model.lm_head(states)
        logits = nn.functional.linear(states, self.model.lm_head.weight)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return transformers.modeling_outputs.CausalLMOutput(loss=loss, logits=logits)


def test_the_output_layer_need_not_be_called():
    model, texts = exact(Fused()), make_texts()
    model(**make_target())
    seen = []
    model.base_model.register_forward_hook(lambda *args: seen.append(1))
    replay_divergence(model, **texts)
    seen.clear()
    _, one, _, two = both(model, make_target(), texts)
    assert len(seen) == 3
    assert_same(gradients(model, one), gradients(model, two))


def moe():
    return small("Mixtral", num_local_experts=2, num_experts_per_tok=1)


def add(name, make):
    return lambda target: target | {name: make(target["input_ids"])}


APART = {
    "position ids": (make_llama, add("position_ids", lambda x: torch.arange(11).expand(4, 11))),
    "4-d mask": (make_llama, add("attention_mask", lambda x: torch.ones(4, 1, 11, 11) > 0)),
    "embeddings": (
        make_llama,
        lambda t: {"inputs_embeds": torch.randn(4, 11, 16).double(), "labels": t["labels"]},
    ),
    "hidden states": (make_llama, add("output_hidden_states", lambda x: True)),
    "hidden states of the configuration": (partial(make_llama, output_hidden_states=True), dict),
    "experts": (moe, dict),
    "data parallel": (lambda: nn.DataParallel(make_llama()), dict),
    "compiled": (lambda: torch.compile(make_llama(), backend="eager"), dict),
    "no body": (AddsToItsLogits, lambda t: {k: v for k, v in t.items() if k != "labels"}),
    "no head": (Headless, lambda t: {k: v for k, v in t.items() if k != "labels"}),
    "another curve": (AnotherCurve, lambda t: {k: v for k, v in t.items() if k != "labels"}),
    "a body that is not called": (lambda: opt(), dict),
}


def opt():
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=30, hidden_size=16, ffn_dim=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=40, word_embed_proj_dim=16, pad_token_id=0, dropout=0.0,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config)


@pytest.mark.parametrize("name", sampled([*APART], [name for name in APART if name != "compiled"]))
# Dynamo reads .grad of the tensors between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_what_cannot_ride_runs_in_a_call_of_its_own(name):
    make, change = APART[name]
    model, texts = make(), make_texts()
    model = model if name == "experts" else model.double()  # their kernel has no float64
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if name != "experts" else {}
    target = change(make_target())
    with divergence_beside(model, **texts) as divergence:
        outputs = model(**target)
        found = divergence()
    alone, expected = model(**target), replay_divergence(model, **texts)
    torch.testing.assert_close(found, expected, **tolerance)
    for ours, theirs in zip(
        *([x if isinstance(x, torch.Tensor) else x.logits] for x in (outputs, alone)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, **tolerance)


def calls(model, texts, target):
    """How often the body runs for a target and its texts."""
    replay_divergence(model, **texts)
    seen = []
    model.model.register_forward_hook(lambda *args: seen.append(1))
    with divergence_beside(model, **texts) as divergence:
        model(**target)
        divergence()
    return len(seen)


@pytest.mark.parametrize(("length", "expected"), [(6, 2), (7, 1), (10, 1), (12, 2)])
def test_padding_must_be_cheaper_than_another_call(length, expected, monkeypatch):
    monkeypatch.setattr(ride, "_PADDING", 0.1)
    assert calls(make_llama(), make_texts(length=8), make_target(length)) == expected


def test_only_the_first_call_with_gradients_takes_texts_along():
    model, texts, target = exact(make_llama()), make_texts(), make_target()
    plain = model(**target)
    with divergence_beside(model, **texts) as divergence:
        with torch.no_grad():
            assert model(**target).loss == plain.loss
        for _ in range(2):
            torch.testing.assert_close(model(**target).loss, plain.loss)
        first = divergence()
    with divergence_beside(model, **texts) as divergence:
        second = divergence()  # before any call
    torch.testing.assert_close(first, second)
    hooks = model.model._forward_hooks, model.model._forward_pre_hooks
    assert not any(hooks)
    model.loss_function = None
    with pytest.raises(TypeError), divergence_beside(model, **texts):
        model(**target)
    assert not any(hooks)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("make", [make_llama, gpt2])
def test_gradient_checkpointing(make, reentrant):
    model, texts = exact(make()).train(), make_texts()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    _, _, _, two = both(model, make_target(), texts)
    correct = gradients(model, two)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    with divergence_beside(model, **texts) as divergence:
        loss = model(**make_target()).loss + 0.5 * divergence()
    assert_same(gradients(model, loss), correct)


def test_bfloat16_autocast():
    model, texts, target = make_llama(scale=0.2), make_texts(), make_target()
    _, _, _, two = both(model, target, texts)
    correct = gradients(model, two)
    with torch.autocast("cpu", torch.bfloat16):
        _, one, _, _ = both(model, target, texts)
    for name, found in gradients(model, one).items():
        assert (found - correct[name]).norm() < 0.05 * correct[name].norm(), name


def test_float16_with_a_scaled_loss():
    """The factor of the divergence is applied after it, so that nothing is lost below 6e-8."""
    model, texts, target = make_llama(scale=0.2), make_texts(), make_target()
    factor, scale = 1e-6, 2.0**16
    correct = gradients(model, factor * replay_divergence(model, **texts))
    with torch.autocast("cpu", torch.float16), divergence_beside(model, **texts) as divergence:
        loss = 0.0 * model(**target).loss + factor * divergence()
    for name, found in gradients(model, scale * loss).items():
        assert (found / scale - correct[name]).norm() < 0.05 * correct[name].norm(), name


@pytest.mark.parametrize("name", ["llama", "soft-capped"])
def test_looking_at_the_model_draws_no_random_numbers(name):
    model, texts, target = LEAN[name]().train(), make_texts(), make_target()
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        _, one, _, two = both(model, target, texts)
        found.append((one.item(), two.item(), torch.rand(1).item()))
    assert found[0] == found[1]


def wrapped(kind, model):
    from torch.distributed.fsdp import fully_shard

    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for module in list(model.modules()):
        if type(module).__name__.endswith("DecoderLayer"):
            fully_shard(module)
    if kind == "fsdp2, head apart":
        fully_shard(model.lm_head)
    return fully_shard(model)


def on_a_rank(kind, name, rank, world, lengths=(11, 11)):
    """The gradients on a rank's half of the texts and of the targets, and the calls of the body."""
    model, texts = exact(LEAN[name]()), make_texts(rows=4)
    size = 4 // world
    rows = slice(size * rank, size * (rank + 1))
    where, teacher = texts["where"], texts["teacher"]
    part = slice(int(where[: rows.start].sum()), int(where[: rows.stop].sum()))
    mine = {
        "inputs": {n: x[rows] for n, x in texts["inputs"].items()},
        "where": where[rows],
        "teacher": KeptTokens(
            teacher.ids[part], teacher.log_probs[part], teacher.rest[part], teacher.sampled
        ),
    }
    target = {n: x[rows, : lengths[rank]] for n, x in make_target(max(lengths)).items()}
    net = wrapped(kind, model)
    replay_divergence(net, **mine)
    seen = []
    model.base_model.register_forward_hook(lambda *args: seen.append(1))
    with divergence_beside(net, **mine) as divergence:
        loss = net(**target).loss + divergence()
    found = gradients(net, loss).items()
    return {
        n.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g
        for n, g in found
    }, len(seen)


KINDS = ["ddp", "fsdp2", "fsdp2, head apart"]


@pytest.fixture
def one_rank():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "tied llama"])
def test_wrapped_models(kind, name, one_rank):
    if (kind, name) == ("fsdp2, head apart", "tied llama"):
        pytest.skip("tied weights are in one group")
    model, texts = exact(LEAN[name]()), make_texts(rows=4)
    loss = model(**make_target()).loss + replay_divergence(model, **texts)
    found, count = on_a_rank(kind, name, 0, 1)
    assert count == (2 if kind == "fsdp2, head apart" else 1)
    assert_same(found, gradients(model, loss))


@pytest.mark.soak
def test_two_ranks(tmp_path):
    """If the texts cannot ride on one rank, they ride on none: the ranks would not wait."""
    out = tmp_path / "out.pt"
    run_on_ranks(2, save_from_rank, out, folder=tmp_path)
    for (kind, lengths), (found, count) in torch.load(out, weights_only=True).items():
        apart = kind == "fsdp2, head apart" or lengths == (10, 4)
        assert count == (2 if apart else 1), (kind, lengths)
        model, texts, target = exact(LEAN["llama"]()), make_texts(rows=4), make_target(10)
        halves = [
            model(**{n: x[2 * i : 2 * i + 2, :length] for n, x in target.items()}).loss
            for i, length in enumerate(lengths)
        ]
        loss = sum(halves) + replay_divergence(model, **texts)
        assert_same({n: 2 * g for n, g in found.items()}, gradients(model, loss))


def save_from_rank(out):
    ride._PADDING = 0.2
    rank = torch.distributed.get_rank()
    found = {
        (kind, lengths): on_a_rank(kind, "llama", rank, 2, lengths)
        for kind in KINDS
        for lengths in ((10, 10), (10, 4))
    }
    if rank == 0:
        torch.save(found, out)


def test_a_copy_of_a_model_learns_by_itself():
    model, texts = exact(make_llama()), make_texts()
    replay_divergence(model, **texts)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    _, one, _, two = both(other, make_target(), texts)
    torch.testing.assert_close(one, two, atol=1e-10, rtol=0)
