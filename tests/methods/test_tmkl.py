import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from golden import tmkl as golden
from holdfast._torch.head_loss import divergence_of
from holdfast._torch.teachers import AllTokens
from holdfast.methods.identity import Uniform
from holdfast.methods.tmkl import TMKL, OtherTokens, without_targets
from methods.runs import (
    CLASSES,
    collate_for,
    gradient,
    loss_of,
    make_model,
    make_run,
    make_samples,
    moved,
    outputs_and_labels,
    recalled,
)

SETTINGS = [TMKL(0.7), TMKL(0.7, cache=False)]


def prepared(task, recall, model=None):
    """The criterion of a pretrained model, and the model some way from there."""
    model = make_model(task) if model is None else model
    run = make_run(model, make_samples(task), task, collate=collate_for(task))
    return recalled(recall, run), moved(model)


def literal(task, model, base):
    outputs, labels = outputs_and_labels(model, make_samples(task))
    of_base = [z.detach() for z in outputs_and_labels(base, make_samples(task))[0]]
    return golden.loss(task, outputs, of_base, labels, 0.7)


@pytest.mark.parametrize("recall", SETTINGS, ids=["kept", "live"])
@pytest.mark.parametrize("task", CLASSES)
def test_loss_and_gradient_are_the_literal_ones(task, recall):
    criterion, model = prepared(task, recall)
    ours, theirs = (
        loss_of(criterion, model, collate_for(task)),
        literal(task, model, make_model(task)),
    )
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    found, expected = gradient(ours, model), gradient(theirs, model)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


def certain(task):
    """A model that is certain of the last label of the first sample, and of no other class."""
    model, label = make_model(task), torch.as_tensor(make_samples(task)[0]["labels"])
    with torch.no_grad():
        model.head.bias[label.flatten()[-1]] += 12
    return model


@pytest.mark.parametrize("recall", SETTINGS, ids=["kept", "live"])
@pytest.mark.parametrize("task", CLASSES)
def test_targets_of_which_the_base_is_certain_are_left_out(task, recall):
    criterion, model = prepared(task, recall, certain(task))
    ours, theirs = loss_of(criterion, model, collate_for(task)), literal(task, model, certain(task))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)
    outputs, labels = outputs_and_labels(certain(task), make_samples(task))
    p = [row[y].item() for rows in golden.rows_of(task, outputs, labels) for row, y in rows]
    assert 0 < sum(x > 1 - 1e-4 for x in p) < len(p)  # some are left out, not all


@pytest.mark.parametrize("recall", SETTINGS, ids=["kept", "live"])
@pytest.mark.parametrize("task", CLASSES)
def test_it_costs_nothing_to_stay(task, recall):
    criterion, _ = prepared(task, recall)
    model = make_model(task)
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    for_both = [loss_of(c, model, collate_for(task)).item() for c in (criterion, uniform)]
    assert for_both[0] == pytest.approx(for_both[1], rel=1e-12)


@pytest.mark.parametrize("task", CLASSES)
def test_no_strength_is_uniform_to_the_bit(task):
    neutral, model = prepared(task, TMKL(**TMKL.neutral))
    uniform = Uniform().prepare(make_run(model, make_samples(task), task))
    assert type(neutral) is type(uniform)
    a, b = (loss_of(c, model, collate_for(task)) for c in (neutral, uniform))
    assert torch.equal(a, b)


@pytest.mark.parametrize("task", CLASSES)
def test_cutting_an_update_changes_nothing(task):
    criterion, model = prepared(task, TMKL(0.7))
    collate = collate_for(task)
    whole = loss_of(criterion, model, collate, num_targets=17.0)
    halves = [
        loss_of(criterion, model, collate, part, num_targets=torch.tensor(17.0))
        for part in ([0, 1, 2], [3, 4, 5, 6])
    ]
    torch.testing.assert_close(sum(halves), whole, rtol=1e-12, atol=0)


numbers = st.floats(-20, 20, width=32)
classes = st.integers(2, 8)


@st.composite
def rows(draw):
    """The logits of two models, and a target."""
    n = draw(classes)
    base, z = (draw(st.lists(numbers, min_size=n, max_size=n)) for _ in range(2))
    as_rows = (torch.tensor([x], dtype=torch.float64) for x in (base, z))
    return (*as_rows, torch.tensor([draw(st.integers(0, n - 1))]))


def apart(base, z, y):
    other = OtherTokens()
    return divergence_of(other.part(z, y), AllTokens(other.part(base, y)))


class TestTheDivergence:
    @settings(deadline=None)
    @given(rows())
    def test_is_not_negative_and_0_at_the_base(self, given):
        base, z, y = given
        assert apart(base, z, y) >= -1e-12
        assert apart(base, base + 3, y).abs() <= 1e-12

    @settings(deadline=None)
    @given(rows(), numbers)
    def test_does_not_depend_on_the_probability_of_the_target(self, given, change):
        base, z, y = given
        z = z.requires_grad_()
        value = apart(base, z, y)
        (slope,) = torch.autograd.grad(value, z)
        assert slope[0, y] == 0
        assert slope.sum().abs() <= 1e-12  # a common shift of the others changes p(y) only
        for logits in (base, z):
            other = logits.detach().clone()
            other[0, y] += change
            pair = (other, z) if logits is base else (base, other)
            torch.testing.assert_close(apart(*pair, y), value, rtol=1e-9, atol=1e-12)

    @settings(deadline=None)
    @given(rows())
    def test_is_a_part_of_the_whole_one(self, given):
        """Equation 2 of the paper."""
        base, z, y = given
        log_p, log_q = base.log_softmax(1), z.log_softmax(1)
        whole = divergence_of(z, AllTokens(base)).item()
        p, q = (x.exp()[0, y].item() for x in (log_p, log_q))
        others = [without_targets(x, y).logsumexp(1).item() for x in (log_p, log_q)]
        binary = p * (log_p - log_q)[0, y].item() + (1 - p) * (others[0] - others[1])
        expected = binary + (1 - p) * apart(base, z, y).item()
        assert whole == pytest.approx(expected, rel=1e-6, abs=1e-9)

    @settings(deadline=None)
    @given(rows())
    def test_the_others_keep_their_logits(self, given):
        _, z, y = given
        left = without_targets(z, y)[0].tolist()
        expected = z[0].tolist()
        del expected[int(y)]
        assert sorted(left) == sorted(expected)


@pytest.mark.parametrize("task", ["regression", "multi_label", lambda model, batch: None])
def test_other_tasks_are_refused(task):
    run = make_run(make_model("regression"), [], task)
    with pytest.raises(ValueError, match=r"needs the probability of each target.*another recall"):
        recalled(TMKL(), run)


@pytest.mark.parametrize(
    ("wrong", "words"), [({"strength": -1}, "strength must be"), ({"top": 1}, "top must be")]
)
def test_settings_are_checked(wrong, words):
    with pytest.raises(ValueError, match=words):
        TMKL(**wrong)
