import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from holdfast import count_targets, global_targets, per_sample_loss, weighted_loss
from ranks import run_on_ranks

LM_LABELS = torch.tensor([[4, 1, 2, -100], [-100, -100, 3, 0], [1, -100, -100, -100]])


def make_logits(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_causal_lm_shifts_and_ignores():
    logits = make_logits(3, 4, 5)
    nll = -logits.log_softmax(-1)
    expected = [(nll[0, 0, 1] + nll[0, 1, 2]) / 2, (nll[1, 1, 3] + nll[1, 2, 0]) / 2]
    losses = per_sample_loss(logits, LM_LABELS, "causal_lm")
    assert torch.allclose(losses[:2], torch.stack(expected))
    assert losses[2].isnan()  # its only label stands where nothing is predicted
    assert count_targets(LM_LABELS, "causal_lm").tolist() == [2, 2, 0]


def test_token_classification_does_not_shift():
    logits = make_logits(3, 4, 5)
    nll = -logits.log_softmax(-1)
    losses = per_sample_loss(logits, LM_LABELS, "token_classification")
    assert torch.allclose(losses[2], nll[2, 0, 1])
    assert torch.allclose(losses[0], (nll[0, 0, 4] + nll[0, 1, 1] + nll[0, 2, 2]) / 3)


def test_one_target_a_sample():
    logits, labels = make_logits(3, 5), torch.tensor([4, 0, 2])
    expected = F.cross_entropy(logits, labels, reduction="none")
    assert torch.allclose(per_sample_loss(logits, labels, "classification"), expected)
    hot = F.one_hot(labels, 5)
    expected = F.binary_cross_entropy_with_logits(logits, hot.float(), reduction="none").mean(1)
    assert torch.allclose(per_sample_loss(logits, hot, "multi_label"), expected)
    values = make_logits(3, 5, seed=1)
    assert torch.allclose(
        per_sample_loss(logits, values, "regression"), (logits - values).square().mean(1)
    )
    assert torch.allclose(
        per_sample_loss(logits[:, :1], values[:, 0], "regression"),
        (logits[:, 0] - values[:, 0]).square(),
    )


def test_uniform_weights_are_the_usual_loss():
    logits = make_logits(3, 4, 5)
    usual = F.cross_entropy(logits[:, :-1].flatten(0, 1), LM_LABELS[:, 1:].flatten())
    assert torch.allclose(weighted_loss(logits, LM_LABELS, torch.ones(3), "causal_lm"), usual)


def test_weights_by_sample_and_by_token_agree():
    logits, weights = make_logits(3, 4, 5), torch.tensor([0.5, 0.25, 0.1])
    by_token = weights[:, None].expand(3, 4)
    assert torch.allclose(
        weighted_loss(logits, LM_LABELS, weights, "causal_lm"),
        weighted_loss(logits, LM_LABELS, by_token, "causal_lm"),
    )


def test_wrong_use():
    logits = make_logits(3, 4, 5)
    with pytest.raises(ValueError, match=r"one value per sample, \(3,\).* got \(4,\)"):
        weighted_loss(logits, LM_LABELS, torch.ones(4), "causal_lm")
    with pytest.raises(ValueError, match="task must be one of causal_lm"):
        per_sample_loss(logits, LM_LABELS, "language")
    with pytest.raises(ValueError, match="the shapes must be equal"):
        per_sample_loss(torch.zeros(4, 3), torch.zeros(4), "regression")
    with pytest.raises(ValueError, match="num_targets must be > 0, got 0"):
        weighted_loss(logits, LM_LABELS, [1.0, 1.0, 1.0], "causal_lm", 0)
    with pytest.raises(TypeError, match="pass a list of label tensors"):
        global_targets(LM_LABELS, "causal_lm")
    with pytest.raises(ValueError, match="no micro-batches"):
        global_targets([], "causal_lm")


# Gradients do not depend on how an update is cut.

SAMPLES = 32


def problem():
    """A small model of sequences and ragged labels, float64."""
    generator = torch.Generator().manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(11, 6), torch.nn.Tanh(), torch.nn.Linear(6, 11))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    ids = torch.randint(0, 11, (SAMPLES, 9), generator=generator)
    ragged = torch.randint(0, 9, (SAMPLES, 1), generator=generator) > torch.arange(9)
    ragged[3::8] = True  # micro-batches without any target
    weights = torch.rand(SAMPLES, generator=generator)
    return model.double(), ids, ids.masked_fill(ragged, -100), weights


def gradients(micro_batches, rank=0, world=1):
    model, ids, labels, weights = problem()
    mine = [torch.arange(SAMPLES)[rank::world][i::micro_batches] for i in range(micro_batches)]
    target = torch.nn.parallel.DistributedDataParallel(model) if world > 1 else model
    total = global_targets([labels[i] for i in mine], "causal_lm")
    for i in mine:
        loss = weighted_loss(target(ids[i]), labels[i], weights[i], "causal_lm", total)
        loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("micro_batches", [4, 16])
def test_accumulation(micro_batches):
    assert torch.allclose(gradients(micro_batches), gradients(1), rtol=1e-9, atol=1e-12)


def test_averaging_micro_batches_would_be_wrong():
    """What the division by the whole is for: ragged batches weigh by their targets."""
    model, ids, labels, weights = problem()
    for i in torch.arange(SAMPLES).split(2):
        loss = weighted_loss(model(ids[i]), labels[i], weights[i], "causal_lm") / 16
        loss.backward()
    naive = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert not torch.allclose(naive, gradients(1), rtol=1e-3)


def save_gradients(out):
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = gradients(4, rank, world)
    if rank == 0:
        torch.save(found, out)


def test_two_ranks(tmp_path):
    run_on_ranks(2, save_gradients, tmp_path / "g.pt", folder=tmp_path)
    assert torch.allclose(torch.load(tmp_path / "g.pt"), gradients(1), rtol=1e-5, atol=1e-9)
