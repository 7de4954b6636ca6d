"""The divergences from a teacher against their definitions, in float64."""

import pytest
import torch

from holdfast._torch.teachers import AllTokens, DrawnTokens, TopTokens


def random(n=5, vocabulary=11, k=4, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, vocabulary, generator=generator, dtype=dtype)
    theirs = (2 * torch.randn(n, vocabulary, generator=generator, dtype=dtype)).log_softmax(1)
    log_probs, ids = theirs.topk(k)
    return z.requires_grad_(), theirs, TopTokens(ids, log_probs)


def twin(z, ids, log_probs):
    """KL over k + 1 events, written as it is defined."""
    rows = []
    for logits, tokens, log_p in zip(z, ids, log_probs, strict=True):
        q = logits.softmax(0)
        p = log_p.exp()
        kl = sum(p[i] * (p[i] / q[t]).log() for i, t in enumerate(tokens))
        others = sorted(set(range(len(q))) - set(tokens.tolist()))
        if others:
            kl = kl + (1 - p.sum()) * ((1 - p.sum()) / q[others].sum()).log()
        rows.append(kl)
    return torch.stack(rows)


def check(z, teacher, expected, tolerance=1e-12):
    values, gradient = teacher.compare(slice(0, len(z)), z.detach())
    torch.testing.assert_close(values, expected.detach(), atol=tolerance, rtol=0)
    (correct,) = torch.autograd.grad(expected.sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient(), correct, atol=tolerance, rtol=0)


@pytest.mark.parametrize("k", [1, 4, 10, 11])
def test_top_tokens(k):
    z, _, teacher = random(k=k)
    check(z, teacher, twin(z, teacher.ids, teacher.log_probs))


def test_all_tokens():
    z, theirs, _ = random()
    expected = (theirs.exp() * (theirs - z.log_softmax(1))).sum(1)
    check(z, AllTokens(theirs), expected)
    check(z, AllTokens(theirs + 3), expected)  # logits, not log-probabilities
    check(z, AllTokens(theirs[:, :0], lambda rows: theirs), expected)


def test_drawn_tokens():
    z, theirs, _ = random()
    ids = torch.tensor([0, 10, 3, 3, 7])
    log_probs = theirs.gather(1, ids[:, None])[:, 0]
    expected = log_probs - z.log_softmax(1).gather(1, ids[:, None])[:, 0]
    check(z, DrawnTokens(ids, log_probs), expected)


def test_drawn_tokens_estimate_the_divergence_without_bias():
    z, theirs, _ = random(n=3)
    ids = torch.arange(11).expand(3, 11)
    every = [
        DrawnTokens(ids[:, i], theirs[:, i]).compare(slice(3), z.detach())[0] for i in range(11)
    ]
    mean = (torch.stack(every, 1) * theirs.exp()).sum(1)  # over the teacher's distribution
    torch.testing.assert_close(mean, AllTokens(theirs).compare(slice(3), z.detach())[0])


def test_top_tokens_are_a_lower_bound():
    z, theirs, _ = random(n=50)
    z = z.detach()
    exact = AllTokens(theirs).compare(slice(50), z)[0]
    last = torch.zeros(50, dtype=torch.float64)
    for k in range(1, 12):
        found = TopTokens(*reversed(theirs.topk(k))).compare(slice(50), z)[0]
        assert (found >= last - 1e-12).all()
        last = found
    torch.testing.assert_close(last, exact)


def test_a_part_of_the_positions():
    z, theirs, teacher = random()
    for each in (teacher, AllTokens(theirs), DrawnTokens(teacher.ids[:, 0], theirs[:, 0])):
        whole, gradient = each.compare(slice(0, 5), z.detach())
        some, part = each.compare(slice(2, 4), z.detach()[2:4])
        torch.testing.assert_close(some, whole[2:4])
        torch.testing.assert_close(part(), gradient()[2:4])


@pytest.mark.parametrize("rest", [1e-3, 1e-7, 1e-12])
def test_a_small_rest_is_exact_in_float32(rest):
    """All but ``rest`` of the mass is in the top-k: 1 − Σ q has no correct digit in float32."""
    n, vocabulary, k = 4, 1000, 8
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(n, vocabulary, generator=generator, dtype=torch.float64)
    z[:, k:] += z[:, :k].logsumexp(1, keepdim=True) - z[:, k:].logsumexp(1, keepdim=True)
    z[:, k:] += torch.tensor(rest, dtype=torch.float64).log()
    z = z.float().double().requires_grad_()
    ids = torch.arange(k).expand(n, k)
    log_p = torch.full((n, k), 1 / k, dtype=torch.float64).log()
    log_p += torch.log1p(torch.tensor(-3e-3, dtype=torch.float64))  # the teacher's rest is .003
    expected = twin(z, ids, log_p)
    (correct,) = torch.autograd.grad(expected.sum(), z)
    values, gradient = TopTokens(ids, log_p).compare(slice(0, n), z.detach().float())
    torch.testing.assert_close(values.double(), expected.detach(), rtol=1e-5, atol=0)
    error = gradient().double() - correct
    assert error.norm() < 1e-6 * correct.norm()
    assert error[:, k:].norm() < 1e-4 * correct[:, k:].norm()  # the rounding of the teacher's .003


def test_half_precision_teachers():
    z, theirs, teacher = random(n=40, vocabulary=50, k=20)
    exact, exactly = teacher.compare(slice(0, 40), z.detach())
    rounded = TopTokens(teacher.ids.int(), teacher.log_probs.half())
    values, gradient = rounded.compare(slice(0, 40), z.detach().float())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(gradient().double(), exactly(), atol=2e-3, rtol=0)


def test_rounding_above_one_never_makes_a_divergence_negative():
    """log p rounded up: Σ p > 1, and the rest is empty."""
    z, theirs, _ = random(n=20)
    ids = theirs.topk(10).indices
    log_probs = theirs.gather(1, ids) + 0.01
    z = theirs + 0.001
    values, gradient = TopTokens(ids, log_probs).compare(slice(0, 20), z)
    assert (values > -1e-12).all()
    torch.testing.assert_close(gradient().sum(1), torch.zeros(20, dtype=torch.float64))


def test_tokens_that_the_teacher_excludes():
    z, theirs, _ = random()
    theirs = theirs.clone()
    theirs[:, 3] = -torch.inf
    for teacher in (AllTokens(theirs), TopTokens(torch.arange(11).expand(5, 11), theirs)):
        values, gradient = teacher.compare(slice(0, 5), z.detach())
        assert values.isfinite().all()
        torch.testing.assert_close(gradient()[:, 3], z.detach().softmax(1)[:, 3])


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"positions × k, got \(3, 2\) and \(3, 4\)"):
        TopTokens(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 4))
    with pytest.raises(ValueError, match="one value per position"):
        DrawnTokens(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1))
