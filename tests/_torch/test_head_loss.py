"""The divergence of whole models against a literal twin: all logits at once, and autograd."""

import copy

import pytest
import torch
import transformers
from torch import nn

from heads import LEAN, MODELS, Largest, assert_same, exact, gradients, with_lora
from holdfast._torch.adapters import adapters_off
from holdfast._torch.head_loss import replay_divergence, teacher_of
from holdfast._torch.teachers import AllTokens, DrawnTokens, KeptTokens
from ranks import run_on_ranks
from small import make_llama, noisy

K = 5


@pytest.fixture
def batch():
    torch.manual_seed(1)
    ids = torch.randint(4, 30, (3, 7))
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    return {"input_ids": ids, "attention_mask": mask}, mask.bool() & (torch.rand(3, 7) < 0.8)


def kept(ids, log_probs, sampled=1, kind=KeptTokens):
    likeliest = log_probs[:, : log_probs.shape[1] - sampled]
    return kind(ids, log_probs, 1 - likeliest.exp().sum(1), sampled)


def top_of(log_probs, k=K):
    best = log_probs.topk(k)
    return kept(best.indices, best.values, 1)


def make_teachers(where, dtype=torch.float64):
    torch.manual_seed(3)
    log_probs = (2 * torch.randn(int(where.sum()), 30, dtype=dtype)).log_softmax(1)
    return {"all": AllTokens(log_probs), "top": top_of(log_probs)}


def twin(model, inputs, where, teacher):
    outputs = model(**inputs)
    log_q = getattr(outputs, "logits", outputs)[where].log_softmax(-1)
    if isinstance(teacher, AllTokens):
        return (teacher.states.exp() * (teacher.states - log_q)).sum()
    weights = teacher.log_probs.exp()
    weights[:, -1] = 1 - weights[:, :-1].sum(1)  # the last token stands for all others
    log_r = log_q.gather(1, teacher.ids) - teacher.log_probs
    moved = (weights * (log_r.exp() - 1 - log_r))[:, :-1].sum(1, keepdim=True).detach()
    return (weights * ((log_r.exp() - 1) / (1 + 5 * moved) - log_r)).sum()


@pytest.mark.parametrize("kind", ["all", "top"])
@pytest.mark.parametrize("name", MODELS)
def test_it_equals_the_twin(name, kind, batch):
    model, teacher = exact(MODELS[name]()), make_teachers(batch[1])[kind]
    expected = twin(model, *batch, teacher)
    correct = gradients(model, expected)
    for rows in (1, 7, 100):
        loss = replay_divergence(model, *batch, teacher, chunk=rows * 30)
        assert loss.dtype == torch.float64
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        assert_same(gradients(model, 3 * loss), {n: 3 * g for n, g in correct.items()})


@pytest.mark.parametrize("name", LEAN)
def test_no_tensor_has_the_size_of_the_logits(name):
    vocabulary, chunk = 4000, 16 * 4000
    model = LEAN[name](vocab=vocabulary)
    inputs = {"input_ids": torch.randint(4, vocabulary, (6, 40))}
    where = torch.ones(6, 40, dtype=torch.bool)
    teacher = kept(torch.arange(K).expand(240, K), torch.full((240, K), -3.0), 1)
    with Largest() as largest:
        replay_divergence(model, inputs, where, teacher, chunk=chunk).backward()
    assert largest.numel == chunk < where.numel() * vocabulary
    with Largest() as largest, torch.no_grad():
        replay_divergence(model, inputs, where, teacher, chunk=chunk // 2)
    assert largest.numel <= chunk
    with Largest() as largest:
        teacher = teacher_of(model, inputs, where)
        replay_divergence(model, inputs, where, teacher, chunk=chunk)
    has_adapters = name in ("lora on the head", "trained head beside lora")
    assert (largest.numel == where.numel() * vocabulary) is has_adapters


@pytest.mark.parametrize("name", ["tied llama", "soft-capped", "adds to its logits"])
def test_at_its_own_teacher_it_is_zero_and_stays(name, batch):
    model = MODELS[name]().double()
    own = teacher_of(model, *batch)
    logits = model(**batch[0])
    log_probs = getattr(logits, "logits", logits).detach()[batch[1]].log_softmax(-1)
    for teacher in (own, AllTokens(log_probs), top_of(log_probs)):
        loss = replay_divergence(model, *batch, teacher)
        assert abs(loss.item()) < 1e-12
        if isinstance(teacher, KeptTokens):
            continue  # its gradient is zero only on average
        assert all(g.abs().max() < 1e-10 for g in gradients(model, loss).values())


def test_another_model_as_teacher(batch):
    base = exact(make_llama())
    model = noisy(base)
    log_probs = base(**batch[0]).logits.detach()[batch[1]].log_softmax(-1)
    expected = twin(model, *batch, AllTokens(log_probs))
    loss = replay_divergence(model, *batch, teacher_of(base, *batch), chunk=90)
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("targets", [["q_proj"], ["q_proj", "lm_head"]])
def test_the_same_model_with_its_adapters_off_as_teacher(targets, batch):
    model = exact(with_lora(targets=targets))
    with adapters_off(model):
        teacher = teacher_of(model, *batch)
        log_probs = model(**batch[0]).logits.detach()[batch[1]].log_softmax(-1)
    loss = replay_divergence(model, *batch, teacher)
    expected = twin(model, *batch, AllTokens(log_probs))
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    assert loss.item() > 0.1
    assert_same(gradients(model, loss), gradients(model, expected))


def test_weights_of_positions(batch):
    inputs, where = batch
    model, teacher = exact(make_llama()), make_teachers(where)["top"]
    weights = torch.rand(len(teacher))
    weights[:4] = 0
    loss = replay_divergence(model, inputs, where, teacher, weights=weights, chunk=90)
    each = [
        twin(model, inputs, row.view_as(where), kept(ids[None], log_probs[None], 1))
        for row, ids, log_probs in zip(
            torch.eye(where.numel(), dtype=torch.bool)[where.flatten()],
            teacher.ids, teacher.log_probs, strict=True,
        )
    ]  # fmt: skip
    expected = (torch.stack(each) * weights).sum()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
    assert_same(gradients(model, loss), gradients(model, expected))


@pytest.mark.parametrize("name", ["llama", "adds to its logits"])
def test_no_position_at_all(name, batch):
    """A rank without texts still takes part in the backward pass: each weight has a gradient."""
    model = MODELS[name]()
    where = torch.zeros_like(batch[1])
    teacher = kept(torch.zeros(0, K, dtype=torch.long), torch.zeros(0, K), 1)
    loss = replay_divergence(model, batch[0], where, teacher)
    found = gradients(model, loss)
    assert loss.item() == 0
    assert found.keys() == {n for n, p in model.named_parameters()}
    assert not any(g.any() for g in found.values())


def test_drawn_tokens_in_a_whole_model(batch):
    inputs, where = batch
    base, model = make_llama(0).double(), make_llama(1).double()
    ids = torch.randint(0, 30, (int(where.sum()),))
    of_base, of_model = (
        m(**inputs).logits[where].log_softmax(-1).gather(1, ids[:, None])[:, 0]
        for m in (base, model)
    )
    with torch.no_grad():
        found = replay_divergence(
            model, inputs, where, DrawnTokens(ids, of_base.detach()), chunk=60
        )
    torch.testing.assert_close(found, (of_base - of_model).sum().detach())


def test_without_gradients_none_are_computed(batch, monkeypatch):
    model, teacher = make_llama(), make_teachers(batch[1])["top"]
    expected = replay_divergence(model, *batch, teacher)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: pytest.fail("a gradient"))
    with torch.no_grad():
        found = replay_divergence(model, *batch, teacher)
    assert not found.requires_grad
    torch.testing.assert_close(found, expected.detach())
    frozen = copy.deepcopy(model).requires_grad_(False)
    assert not replay_divergence(frozen, *batch, teacher).requires_grad


def test_a_frozen_body_and_a_frozen_head(batch):
    teacher = make_teachers(batch[1])["top"]
    for frozen in ("model.", "lm_head."):
        model = exact(make_llama())
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith(frozen))
        loss = replay_divergence(model, *batch, teacher)
        assert_same(gradients(model, loss), gradients(model, twin(model, *batch, teacher)))


@pytest.mark.parametrize("kind", ["all", "top"])
def test_autocast_is_close_to_float32(kind, batch):
    model, teacher = make_llama(scale=0.2), make_teachers(batch[1], torch.float32)[kind]
    expected = replay_divergence(model, *batch, teacher)
    correct = gradients(model, expected)
    with torch.autocast("cpu", torch.bfloat16):
        loss = replay_divergence(model, *batch, teacher, chunk=90)
        reference = twin(model, *batch, teacher)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.01, atol=0)
    for found in (gradients(model, loss), gradients(model, reference)):
        for name, g in correct.items():
            assert (found[name] - g).norm() < 0.05 * g.norm(), name
            assert found[name].dtype == torch.float32


def test_a_bfloat16_model(batch):
    model, teacher = make_llama(scale=0.2), make_teachers(batch[1], torch.float32)["top"]
    expected = replay_divergence(model, *batch, teacher)
    correct = gradients(model, expected)
    half = copy.deepcopy(model).bfloat16()
    loss = replay_divergence(half, *batch, teacher, chunk=90)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0)
    for name, g in gradients(half, loss).items():
        assert g.dtype == torch.bfloat16
        assert (g.float() - correct[name]).norm() < 0.1 * correct[name].norm(), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, batch):
    model, teacher = exact(make_llama()), make_teachers(batch[1])["top"]
    correct = gradients(model, twin(model, *batch, teacher))
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    loss = replay_divergence(model.train(), *batch, teacher, chunk=90)
    assert_same(gradients(model, loss), correct)


@pytest.mark.soak
# Dynamo reads .grad of the tensors between two graphs.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_is_compiled_once_for_it(batch):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    model, teacher = exact(make_llama()), make_teachers(batch[1])["top"]
    expected = twin(model, *batch, teacher)
    correct = gradients(model, expected)
    compiled = torch.compile(model, backend="eager")
    plain = compiled(**batch[0]).logits.shape
    for i in range(4):
        if i == 2:
            counters.clear()
        loss = replay_divergence(compiled, *batch, teacher)
        torch.testing.assert_close(loss, expected, atol=1e-10, rtol=0)
        assert_same(gradients(model, loss), correct)
        assert compiled(**batch[0]).logits.shape == plain
    assert not counters["frames"]
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "soft-capped", "adds to its logits"])
def test_the_first_call_draws_the_same_random_numbers_as_the_others(name, batch):
    """Dropout after a resume must be the same as without one."""
    model, teacher = MODELS[name]().double().train(), make_teachers(batch[1])["top"]
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append((replay_divergence(model, *batch, teacher).item(), torch.rand(1).item()))
    assert found[0] == found[1]


def test_hooks_run_once_and_see_the_whole_gradient(batch):
    model, teacher = exact(make_llama()), make_teachers(batch[1])["top"]
    correct = gradients(model, twin(model, *batch, teacher))
    calls = []
    model.lm_head.weight.register_hook(lambda g: calls.append(1) or 2 * g)
    model.lm_head.register_forward_hook(lambda *args: calls.append(2))
    replay_divergence(model, *batch, teacher)
    calls.clear()  # the first call has looked at the model
    loss = replay_divergence(model, *batch, teacher, chunk=30)
    found = gradients(model, loss)
    assert calls == [2, 1]
    torch.testing.assert_close(found["lm_head.weight"], 2 * correct["lm_head.weight"])


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("has_own", [True, False])
def test_an_error_restores_the_forward(is_first, has_own):
    class Broken(KeptTokens):
        def compare(self, rows, logits):
            raise RuntimeError("broken teacher")

    model, inputs = make_llama(vocab=2000), {"input_ids": torch.randint(4, 2000, (5, 10))}
    where = torch.ones(5, 10, dtype=torch.bool)
    ids, log_probs = torch.arange(K).expand(50, K), torch.full((50, K), -3.0)
    if has_own:
        model.lm_head.forward = model.lm_head.forward
    before = dict(vars(model.lm_head))
    if not is_first:
        replay_divergence(model, inputs, where, kept(ids, log_probs, 1))
    with pytest.raises(RuntimeError, match="broken teacher"):
        replay_divergence(model, inputs, where, kept(ids, log_probs, 1, Broken))
    assert vars(model.lm_head) == before
    with pytest.raises(RuntimeError, match="Float"):
        replay_divergence(model, {"input_ids": where.float()}, where, kept(ids, log_probs, 1))
    assert vars(model.lm_head) == before
    with Largest() as largest:  # no error made it compute all logits
        replay_divergence(model, inputs, where, kept(ids, log_probs, 1), chunk=2000)
    assert largest.numel < where.numel() * 2000


def test_bad_input(batch):
    inputs, where = batch
    model, teacher = make_llama(), make_teachers(where)["top"]
    n = len(teacher)
    with pytest.raises(ValueError, match=f"there are 21 positions and {n} entries"):
        replay_divergence(model, inputs, torch.ones_like(where), teacher)
    with pytest.raises(ValueError, match="weights must have one entry per chosen position"):
        replay_divergence(model, inputs, where, teacher, weights=torch.ones(2))
    classifier = transformers.LlamaForSequenceClassification(model.config)
    with pytest.raises(ValueError, match=r"shape \(3, 7\), the logits \(3, 2\)"):
        replay_divergence(classifier, inputs, where, teacher)
    with pytest.raises(ValueError, match="returns no logits"):
        replay_divergence(model.model, inputs, where, teacher)


def test_labels_and_cache_are_left_out(batch):
    model, teacher = make_llama().train(), make_teachers(batch[1])["top"]
    seen = []
    model.register_forward_pre_hook(lambda _, args, given: seen.append(given), with_kwargs=True)
    labels = batch[0]["input_ids"]
    replay_divergence(model, {**batch[0], "labels": labels}, batch[1], teacher)
    assert seen[0].keys() == {"input_ids", "attention_mask", "use_cache"}
    assert seen[0]["use_cache"] is False


CASES = ("llama", "tied llama", "soft-capped", "lora", "lora on the head")


def make_case(name):
    torch.manual_seed(7)
    ids = torch.randint(4, 30, (4, 7))
    where = torch.rand(4, 7) < 0.7
    if name == "llama":
        where[2:] = False  # the second rank has no text
    return exact(MODELS[name]()), ({"input_ids": ids}, where), make_teachers(where)["top"]


def on_a_rank(kind, name, rank, world):
    """The gradients of a wrapped model on a part of the batch."""
    from torch.distributed.fsdp import fully_shard

    model, (inputs, where), teacher = make_case(name)
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        for module in list(model.modules()):
            if type(module).__name__.endswith("DecoderLayer"):
                fully_shard(module)
        if name == "llama":
            fully_shard(model.lm_head)
        wrapped = fully_shard(model)
    size = len(where) // world
    rows = slice(size * rank, size * (rank + 1))
    first, count = int(where[: rows.start].sum()), int(where[rows].sum())
    part = slice(first, first + count)
    mine = {"input_ids": inputs["input_ids"][rows]}
    teacher = kept(teacher.ids[part], teacher.log_probs[part], 1)
    with torch.no_grad():
        before = replay_divergence(wrapped, mine, where[rows], teacher)
    loss = replay_divergence(wrapped, mine, where[rows], teacher, chunk=60)
    torch.testing.assert_close(loss, before)
    found = gradients(wrapped, loss).items()
    return {
        n.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g
        for n, g in found
    }


@pytest.fixture
def one_rank():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", CASES)
def test_wrapped_models(kind, name, one_rank):
    model, batch, teacher = make_case(name)
    assert_same(on_a_rank(kind, name, 0, 1), gradients(model, twin(model, *batch, teacher)))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_two_ranks_are_one_process(kind, tmp_path):
    out = tmp_path / "out.pt"
    run_on_ranks(2, save_from_rank, kind, out, folder=tmp_path)
    for name, found in torch.load(out, weights_only=True).items():
        model, batch, teacher = make_case(name)
        expected = gradients(model, twin(model, *batch, teacher))
        assert_same({n: 2 * g for n, g in found.items()}, expected)  # ranks are averaged


def save_from_rank(kind, out):
    rank = torch.distributed.get_rank()
    found = {name: on_a_rank(kind, name, rank, 2) for name in CASES}
    if rank == 0:
        torch.save(found, out)
