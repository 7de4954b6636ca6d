import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.slanted_triangular import rate
from holdfast.optim import slanted_triangular


@given(
    tens=st.integers(1, 100),
    cut=st.sampled_from([0.1, 0.2, 0.3, 0.5]),
    ratio=st.floats(1.0, 100.0),
    where=st.floats(0.0, 1.0),
)
def test_it_is_equation_3(tens, cut, ratio, where):
    total = 10 * tens
    t = min(total - 1, int(where * total))
    expected = rate(t, total, cut_frac=cut, ratio=ratio, eta_max=0.01)
    assert 0.01 * slanted_triangular(t, total, cut=cut, ratio=ratio) == pytest.approx(expected)


@given(total=st.integers(1, 2000), cut=st.floats(0.01, 0.99), update=st.integers(0, 3000))
def test_it_stays_between_its_ends(total, cut, update):
    assert 1 / 32 <= slanted_triangular(update, total, cut=cut) <= 1.0


def test_in_a_scheduler():
    opt = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.32)
    scheduler = torch.optim.lr_scheduler.LambdaLR(opt, lambda t: slanted_triangular(t, 50))
    rates = []
    for _ in range(50):
        rates.append(opt.param_groups[0]["lr"])
        opt.step()
        scheduler.step()
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[5] == pytest.approx(0.32)
    assert rates[:6] == sorted(rates[:6])
    assert rates[5:] == sorted(rates[5:], reverse=True)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"update": -1}, "update is counted from 0"),
        ({"total_updates": 0}, "total_updates must be"),
        ({"cut": 0.0}, "cut must be"),
        ({"cut": 1.0}, "cut must be a fraction"),
        ({"cut": math.nan}, "cut must be"),
        ({"ratio": 0.5}, "ratio must be at least 1"),
    ],
)
def test_refused(bad, message):
    with pytest.raises(ValueError, match=message):
        slanted_triangular(**({"update": 3, "total_updates": 10} | bad))
