"""The divergences from a teacher against their definitions, in float64."""

import pytest
import torch

from holdfast._torch.teachers import AllTokens, DrawnTokens, KeptTokens


def kept(ids, log_probs, sampled):
    """The tokens with the exact probability of all others."""
    likeliest = log_probs[:, : log_probs.shape[1] - sampled]
    return KeptTokens(ids, log_probs, 1 - likeliest.exp().sum(1), sampled)


def random(n=5, vocabulary=11, k=6, sampled=2, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    z = 2 * torch.randn(n, vocabulary, generator=generator, dtype=dtype)
    theirs = (2 * torch.randn(n, vocabulary, generator=generator, dtype=dtype)).log_softmax(1)
    ids = theirs.topk(k).indices
    ids[:, k - sampled :] = theirs.topk(vocabulary).indices[:, k - sampled :][:, :sampled]  # others
    return z.requires_grad_(), theirs, kept(ids, theirs.gather(1, ids), sampled)


def twin(z, ids, log_probs, sampled):
    """The estimate, written as it is defined."""
    rows = []
    for logits, tokens, log_p in zip(z, ids, log_probs, strict=True):
        p, likeliest = log_p.exp(), len(tokens) - sampled
        rest = 1 - p[:likeliest].sum()
        r = logits.softmax(0)[tokens] / p
        weights = torch.tensor([p[i] if i < likeliest else rest / sampled for i in range(len(p))])
        c = 1 / (1 + 5 * (weights * (r - 1 - r.log()))[:likeliest].sum().detach())
        rows.append((weights * (c * (r - 1) - r.log())).sum())
    return torch.stack(rows)


def check(z, teacher, expected, tolerance=1e-12):
    values, gradient = teacher.compare(slice(0, len(z)), z.detach())
    torch.testing.assert_close(values, expected.detach(), atol=tolerance, rtol=0)
    (correct,) = torch.autograd.grad(expected.sum(), z, retain_graph=True)
    torch.testing.assert_close(gradient(), correct, atol=tolerance, rtol=0)


@pytest.mark.parametrize(("k", "sampled"), [(2, 1), (6, 2), (10, 2), (11, 0)])
def test_kept_tokens(k, sampled):
    z, _, teacher = random(k=k, sampled=sampled)
    check(z, teacher, twin(z, teacher.ids, teacher.log_probs, sampled))


def test_kept_tokens_estimate_the_divergence_without_bias():
    """Over all tokens that could be sampled, in proportion to their probabilities."""
    z, theirs, _ = random(n=3)
    likeliest = theirs.topk(4).indices
    others = [sorted(set(range(11)) - set(row.tolist())) for row in likeliest]
    exact, exactly = AllTokens(theirs).compare(slice(3), z.detach())
    value, slope = torch.zeros_like(exact), torch.zeros_like(theirs)
    for i in range(7):
        one = torch.tensor([[row[i]] for row in others])
        ids = torch.cat([likeliest, one], 1)
        found, gradient = kept(ids, theirs.gather(1, ids), 1).compare(slice(3), z.detach())
        odds = theirs.gather(1, one).exp() / (1 - theirs.gather(1, likeliest).exp().sum(1, True))
        value, slope = value + odds[:, 0] * found, slope + odds * gradient()
    torch.testing.assert_close(value, exact)
    torch.testing.assert_close(slope, exactly())


def test_there_is_no_noise_at_the_pretrained_model():
    _, theirs, teacher = random()
    values, gradient = teacher.compare(slice(5), theirs.detach())
    torch.testing.assert_close(values, torch.zeros(5, dtype=torch.float64), atol=1e-15, rtol=0)
    torch.testing.assert_close(gradient(), torch.zeros_like(theirs), atol=1e-15, rtol=0)


def test_estimates_are_finite():
    z, _, teacher = random(n=200, vocabulary=300, k=8, sampled=4, dtype=torch.float32)
    for scale in (1.0, 30.0, 1e4):
        values, gradient = teacher.compare(slice(200), scale * z.detach())
        assert values.isfinite().all()
        assert gradient().isfinite().all()


def test_less_noise_than_without_the_second_sum():
    """Near the teacher and far from it, over all tokens that could be sampled."""
    _, theirs, _ = random(n=1, vocabulary=200)
    likeliest = theirs.topk(10).indices
    others = torch.tensor([i for i in range(200) if i not in likeliest[0].tolist()])
    odds = theirs[0, others].exp() / theirs[0, others].exp().sum()
    ids = torch.cat([likeliest.expand(190, -1), others[:, None]], 1)
    teacher = kept(ids, theirs[0][ids], 1)
    noise = torch.randn(1, 200, generator=torch.Generator().manual_seed(1)).double()
    for scale, ratio in ((0.1, 0.2), (1.0, 0.9), (4.0, 1.25)):
        z = theirs + scale * noise
        exact = AllTokens(theirs).compare(slice(1), z)[1]()
        found = teacher.compare(slice(190), z.expand(190, -1))[1]()
        first = z.softmax(1).repeat(190, 1)
        first.scatter_add_(1, ids[:, :10], -theirs[0][ids[:, :10]].exp())
        first.scatter_add_(1, ids[:, 10:], -teacher.rest[:, None])
        errors = [(odds * (g - exact).square().sum(1)).sum().sqrt() for g in (found, first)]
        assert errors[0] < ratio * errors[1]


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


def test_a_part_of_the_positions():
    z, theirs, teacher = random()
    for each in (teacher, AllTokens(theirs), DrawnTokens(teacher.ids[:, 0], theirs[:, 0])):
        whole, gradient = each.compare(slice(0, 5), z.detach())
        some, part = each.compare(slice(2, 4), z.detach()[2:4])
        torch.testing.assert_close(some, whole[2:4])
        torch.testing.assert_close(part(), gradient()[2:4])


def test_half_precision_teachers():
    z, theirs, teacher = random(n=40, vocabulary=50, k=20, sampled=5)
    exact, exactly = teacher.compare(slice(0, 40), z.detach())
    rounded = KeptTokens(teacher.ids.int(), teacher.log_probs.half(), teacher.rest.half(), 5)
    values, gradient = rounded.compare(slice(0, 40), z.detach().float())
    assert values.dtype == torch.float32
    torch.testing.assert_close(values.double(), exact, atol=1e-2, rtol=1e-2)
    torch.testing.assert_close(gradient().double(), exactly(), atol=2e-3, rtol=0)


def test_a_token_that_is_sampled_twice_counts_twice():
    z, theirs, teacher = random(k=6, sampled=2)
    ids = teacher.ids.clone()
    ids[:, 5] = ids[:, 4]
    twice = kept(ids, theirs.gather(1, ids), 2)
    once = kept(ids[:, :5], theirs.gather(1, ids[:, :5]), 1)
    values, gradient = twice.compare(slice(5), z.detach())
    expected, correct = once.compare(slice(5), z.detach())
    torch.testing.assert_close(values, expected)
    torch.testing.assert_close(gradient(), correct())


def test_tokens_that_the_teacher_excludes():
    z, theirs, _ = random()
    theirs = theirs.clone()
    theirs[:, 3] = -torch.inf
    theirs = theirs.log_softmax(1)
    for teacher in (AllTokens(theirs), kept(torch.arange(11).expand(5, 11), theirs, 0)):
        values, gradient = teacher.compare(slice(0, 5), z.detach())
        assert values.isfinite().all()
        torch.testing.assert_close(gradient()[:, 3], z.detach().softmax(1)[:, 3])


def test_bad_shapes():
    with pytest.raises(ValueError, match=r"positions × k, got \(3, 2\) and \(3, 4\)"):
        kept(torch.zeros(3, 2, dtype=torch.long), torch.zeros(3, 4), 1)
    with pytest.raises(ValueError, match="one value per position"):
        DrawnTokens(torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1))
