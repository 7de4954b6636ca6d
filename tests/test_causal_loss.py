"""The loss of a causal language model in chunks, against plain autograd on all logits."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from heads import LEAN, MODELS, Largest, assert_same, exact, gradients, with_lora
from holdfast import (
    DFT,
    EAFT,
    STM,
    TALR,
    TMKL,
    Distill,
    Flow,
    LoRA,
    Mixout,
    Recipe,
    Run,
    weighted_loss,
)
from holdfast._torch import head_loss
from small import make_llama

OBJECTIVES = {
    "uniform": Recipe(),
    "sample weights": Recipe(objective=Flow(tau=1.0)),
    "token weights": Recipe(objective=Flow(tau=1.0, level="token")),
    "batch median": Recipe(objective=Flow(tau="batch_median")),
    "masked tokens": Recipe(objective=STM(tau=30)),
    "by losses": Recipe(objective=DFT()),
    "by all losses": Recipe(objective=TALR()),
    "by logits": Recipe(objective=EAFT(k=5)),
}
RECALLS = {
    "distill": Recipe(recall=Distill(0.7, 3.0, cache=False)),
    "tmkl": Recipe(recall=TMKL(0.7, cache=False)),
    "tmkl, adapters off": Recipe(trainable=LoRA(r=2), recall=TMKL(0.7, cache=False)),
    "by all losses, distill": Recipe(objective=TALR(), recall=Distill(0.7, cache=False)),
    "distill, kept": Recipe(recall=Distill(0.7, 3.0, top=8)),
    "tmkl, kept": Recipe(objective=DFT(), recall=TMKL(0.7, top=8)),
}


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=[1, 4, 1000], ids="{} rows".format)
def rows(request, monkeypatch):
    """The rows of a chunk."""
    monkeypatch.setattr(head_loss, "LARGE_CHUNK", request.param * 30)


def make_samples(count=6, length=7, vocab=30):
    torch.manual_seed(1)
    samples = []
    for i in range(count):
        ids = torch.randint(4, vocab, (length,))
        labels = ids.clone()
        labels[: i % 4] = -100  # a prompt
        samples.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    samples[2]["labels"][:-1] = [-100] * (length - 1)
    return samples


def make_run(recipe, model, samples=None):
    return Run(recipe, model, samples or make_samples(), lr=1e-3, progress=False, task="causal_lm")


def batch_of(run):
    """All samples, with the columns of the criterion."""
    data = run.criterion.data
    return {name: torch.tensor([data[i][name] for i in range(len(data))]) for name in data[0]}


def logits_of(model, batch):
    outputs = model(input_ids=batch["input_ids"])
    return getattr(outputs, "logits", outputs)


def plain_loss(run, batch, num_targets):
    """All logits at once."""
    criterion, logits = run.criterion, logits_of(run.model, batch)
    values = {name: batch[name] for name in criterion.columns}
    given = {name: x for name, x in batch.items() if name not in values}
    weigh = partial(criterion.weigh, given, values, 1)
    weights = weigh if criterion.weighs_outputs else weigh()
    return weighted_loss(logits, batch["labels"], weights, "causal_lm", num_targets)


@pytest.mark.parametrize("name", MODELS)
def test_it_is_the_plain_loss(name, rows):
    run = make_run(Recipe(), exact(MODELS[name]()))
    batch = batch_of(run)
    logits = logits_of(run.model, batch)[:, :-1].flatten(0, 1)
    expected = F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction="sum") / 20
    correct = gradients(run.model, 3 * expected)
    found = run.loss(batch, 20, 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert_same(gradients(run.model, 3 * found), correct)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives(name, rows):
    run = make_run(OBJECTIVES[name], exact(make_llama(tie_word_embeddings=True)).train())
    batch = batch_of(run)
    expected = plain_loss(run, batch, torch.tensor(20.0))
    correct = gradients(run.model, expected)
    found = run.loss(batch, torch.tensor(20.0), 1)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert_same(gradients(run.model, found), correct)


@pytest.mark.parametrize("name", RECALLS)
def test_recalls(name, rows):
    recipe = RECALLS[name]
    run = make_run(recipe, exact(make_llama()).train())
    base = copy.deepcopy(run.model).eval()
    with torch.no_grad():
        for p in filter(lambda p: p.requires_grad, run.model.parameters()):
            p += 0.2 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    batch = batch_of(run)
    labels = batch["labels"][:, 1:]
    targets = labels[where := labels != -100]
    z = logits_of(run.model, batch)[:, :-1][where]
    with torch.no_grad():
        z_base = logits_of(base, batch)[:, :-1][where]
    recall = recipe.recall
    if isinstance(recall, TMKL):
        used = z_base.softmax(1).gather(1, targets[:, None])[:, 0] <= 1 - 1e-4
        hidden = F.one_hot(targets, 30).bool()
        z, z_base = (x.masked_fill(hidden, -1e30)[used] for x in (z, z_base))
        factor, temperature = recall.strength, 1.0
    else:
        temperature = recall.temperature
        factor = recall.strength * temperature**2
    log_p, log_q = ((x / temperature).log_softmax(1) for x in (z_base, z))
    kl = (log_p.exp() * (log_p - log_q)).nansum() if recall.cache is False else None
    if kl is None:  # an estimate from kept tokens, which test_teachers.py compares with its twin
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(head_loss, "LARGE_CHUNK", 1 << 26)
            expected = run.loss(batch, 20, 1)
    else:
        expected = plain_loss(run, batch, 20) + factor * kl / 20
    correct = gradients(run.model, expected)
    found = run.loss(batch, 20, 1)
    torch.testing.assert_close(found, expected, atol=1e-11, rtol=1e-11)
    assert_same(gradients(run.model, found), correct)


def assert_lean(run, batch, chunk, vocabulary):
    """No tensor of an update is larger than a chunk of logits."""
    run.loss(batch, 20, 1)  # it learns about the model
    with Largest() as largest:
        run.loss(batch, 20, 1).backward()
    assert largest.numel == chunk < (batch["labels"] != -100).sum() * vocabulary


@pytest.mark.parametrize("name", LEAN)
def test_no_tensor_has_the_size_of_the_logits(name, monkeypatch):
    vocabulary, chunk = 4000, 16 * 4000
    monkeypatch.setattr(head_loss, "LARGE_CHUNK", chunk)
    run = make_run(Recipe(), LEAN[name](vocab=vocabulary).train(), make_samples(6, 40, vocabulary))
    assert_lean(run, batch_of(run), chunk, vocabulary)


@pytest.mark.parametrize("name", [*OBJECTIVES, *RECALLS])
def test_no_method_needs_all_logits(name, monkeypatch):
    vocabulary, chunk = 4000, 16 * 4000
    monkeypatch.setattr(head_loss, "LARGE_CHUNK", chunk)
    recipe = (OBJECTIVES | RECALLS)[name]
    if recipe.objective == STM(tau=30):
        recipe = Recipe(objective=STM(tau=1e9))
    run = make_run(recipe, make_llama(vocab=vocabulary).train(), make_samples(6, 40, vocabulary))
    assert_lean(run, batch_of(run), chunk, vocabulary)


@pytest.mark.parametrize("name", ["tied llama", "bias", "lora on the head"])
def test_autocast_runs_the_head_in_its_dtype(name, rows):
    run = make_run(Recipe(), MODELS[name]().train())
    batch = batch_of(run)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = plain_loss(run, batch, 20), run.loss(batch, 20, 1)
    with torch.no_grad():
        in_float32 = run.loss(batch, 20, 1)
    # A head in float32 would be as far away as the loss in float32.
    torch.testing.assert_close(found, expected, atol=0, rtol=1e-6)
    assert abs(in_float32 - expected) > 1e-5 * expected
    correct = gradients(run.model, expected)
    for name, gradient in gradients(run.model, found).items():
        assert (gradient - correct[name]).norm() <= 0.02 * correct[name].norm()


def test_gradients_in_half_precision_are_rounded_once(monkeypatch):
    """As by one product with all logits, however many chunks there are."""
    torch.manual_seed(0)
    run = make_run(Recipe(), make_llama(scale=0.3).bfloat16().train(), make_samples(40, 60))
    batch, found = batch_of(run), {}
    for chunk in (1 << 26, 4 * 30):
        monkeypatch.setattr(head_loss, "LARGE_CHUNK", chunk)
        found[chunk] = gradients(run.model, run.loss(batch, 1000, 1))["lm_head.weight"].float()
    whole, chunked = found.values()
    assert (chunked - whole).norm() < 0.005 * whole.norm()  # bfloat16 has a step of 0.008


@pytest.mark.parametrize("tied", [True, False])
def test_micro_batches_accumulate(tied, rows):
    run = make_run(Recipe(objective=DFT()), exact(make_llama(tie_word_embeddings=tied)).train())
    batch = batch_of(run)
    correct = gradients(run.model, run.loss(batch, 20, 1))
    parts = [{name: x[i::3] for name, x in batch.items()} for i in range(3)]
    assert (parts[2]["labels"] == -100).any(1).all()
    run.model.zero_grad()
    for part in parts:
        run.loss(part, 20, 1).backward()
    found = {name: p.grad for name, p in run.model.named_parameters()}
    assert_same(found, correct)


def test_a_batch_without_targets_gives_all_parameters_a_gradient():
    run = make_run(Recipe(), make_llama().train())
    batch = batch_of(run)
    loss = run.loss({**batch, "labels": torch.full_like(batch["labels"], -100)}, 20, 1)
    assert loss == 0
    found = gradients(run.model, loss)
    assert found.keys() == dict(run.model.named_parameters()).keys()
    assert not any(gradient.any() for gradient in found.values())


def test_weights_that_are_mixed_in_each_call_are_mixed_once(rows):
    run = make_run(Recipe(trainable=Mixout(p=0.5)), exact(make_llama()))
    run.model.train()
    with torch.no_grad():
        run.model.lm_head.weight += 0.1
    batch, losses = batch_of(run), []
    run.loss(batch, 20, 1)  # it learns about the model
    for compute in (plain_loss, lambda run, *given: run.loss(*given, 1)):
        torch.manual_seed(5)
        losses.append(compute(run, batch, 20))
    torch.testing.assert_close(*losses)


def test_dropout_in_the_head_does_not_depend_on_the_chunks(monkeypatch):
    run = make_run(Recipe(), with_lora(lora_dropout=0.5).train())
    batch, losses = batch_of(run), []
    run.loss(batch, 20, 1)  # it learns about the model
    for chunk in (60, 1 << 26):
        monkeypatch.setattr(head_loss, "LARGE_CHUNK", chunk)
        torch.manual_seed(5)
        losses.append(run.loss(batch, 20, 1))
    torch.testing.assert_close(*losses)


# Dynamo looks at the gradient of what a graph break returns.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model(monkeypatch):
    monkeypatch.setattr(head_loss, "LARGE_CHUNK", 120)
    torch._dynamo.reset()
    run = make_run(Recipe(objective=TALR()), exact(make_llama()).train())
    batch = batch_of(run)
    expected = run.loss(batch, 20, 1)
    correct = gradients(run.model, expected)
    compiled = torch.compile(run.model, backend="eager")
    loss = run.criterion.loss(compiled, batch, 20, 1)
    torch.testing.assert_close(loss, expected)
    assert_same(gradients(run.model, loss), correct)
    torch._dynamo.reset()


@pytest.fixture
def one_rank():
    distributed = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
@pytest.mark.parametrize("name", ["tied llama", "llama", "lora on the head"])
def test_wrapped_models(kind, name, one_rank, monkeypatch):
    from torch.distributed.fsdp import fully_shard

    monkeypatch.setattr(head_loss, "LARGE_CHUNK", 120)
    run = make_run(Recipe(objective=TALR()), exact(MODELS[name]()).train())
    batch = batch_of(run)
    correct = gradients(run.model, plain_loss(run, batch, 20))
    if kind == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(run.model)
    else:
        for module in list(run.model.modules()):
            if type(module).__name__.endswith("DecoderLayer"):
                fully_shard(module)
        wrapped = fully_shard(run.model)
    found = gradients(wrapped, run.criterion.loss(wrapped, batch, 20, 1))
    whole = {
        n.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g
        for n, g in found.items()
    }
    assert_same(whole, correct)
