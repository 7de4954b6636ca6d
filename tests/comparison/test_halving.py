"""The rungs, the merit, and the clock of a search by successive halving."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._torch.checks import duration
from holdfast.comparison.clock import Clock, covered, spent
from holdfast.comparison.halving import (
    REDUCTION,
    RUNGS,
    goes_on,
    make_pruner,
    merit_of,
    rungs_of,
    step_of,
)

optuna = pytest.importorskip("optuna", reason="the cli extra is not installed")
amounts = st.floats(0, 100)
gains = st.floats(-100, 100)


@given(st.integers(1, 10_000))
def test_rungs_lie_before_the_end_and_in_order(total):
    rungs = rungs_of(total)
    assert [*rungs] == sorted(rungs)
    assert [*rungs.values()] == [*range(len(rungs))]
    assert all(0 < update < total for update in rungs)
    if total >= 9:
        assert len(rungs) == len(RUNGS) - 1


@given(gains, gains, amounts, amounts)
def test_a_model_that_another_beats_never_has_more_merit(gain, more_gain, lost, more_lost):
    low, high = sorted((gain, more_gain))
    less, more = sorted((lost, more_lost))
    assert merit_of(low, more) <= merit_of(high, less)


def test_the_unit_of_the_target_does_not_change_the_order():
    models = [(2.4, 1.6), (2.37, 0.19), (1.77, 0.16), (1.28, 0.03)]
    orders = [
        sorted(models, key=lambda one, unit=unit: merit_of(unit * one[0], one[1]))
        for unit in (1.0, 100.0)
    ]
    assert orders[0] == orders[1]
    assert orders[0][-1] == (2.37, 0.19)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=30, unique=True))
def test_a_third_goes_on(merits):
    assert sum(goes_on(merit, merits) for merit in merits) == max(1, len(merits) // REDUCTION)


def test_what_is_unseen_may_be_better_or_worse():
    seen = [6.0, 5.0, 4.0, 3.0, 2.0]
    assert goes_on(6.0, [*seen, math.inf])
    assert not goes_on(5.0, [*seen, math.inf])
    assert goes_on(5.0, [*seen, -math.inf])
    assert not goes_on(4.0, [*seen, -math.inf])


def test_the_pruner_stops_two_thirds_at_each_rung():
    study = optuna.create_study(direction="maximize", pruner=make_pruner(prune=True))
    merits, went_on = [9, 8, 7, 6, 5, 4, 3, 2, 1], []
    for merit in merits:
        trial = study.ask()
        trial.report(merit, step_of(0))
        if not trial.should_prune():
            went_on.append(merit)
    assert went_on[0] == 9
    assert 1 <= len(went_on) <= 3
    trial = study.ask()
    trial.report(10, step_of(0))
    assert not trial.should_prune()
    trial.report(10, step_of(1))
    assert not trial.should_prune()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30m", 1800), ("1h30m", 5400), ("2d", 172800), (" 1h ", 3600), ("120m", 7200)],
)
def test_durations(text, seconds):
    assert duration("budget", text) == seconds


@pytest.mark.parametrize("text", ["", "0s", "1", "1.5h", "h", "30m1h", "-1h", "1 h", "soon", None])
def test_what_is_no_duration(text):
    with pytest.raises(ValueError, match=r"budget must be a duration above 0.*such as 90s, 30m"):
        duration("budget", text)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=8))
def test_overlapping_sessions_count_once(spans):
    spans = [(begin, begin + length) for begin, length in spans]
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert covered(spans) == len(seconds)


def test_time_counts_over_sessions():
    study = optuna.create_study()
    study.set_user_attr("session a", [1000.0, 1060.0])
    study.set_user_attr("session b", [1030.0, 1090.0])
    study.set_user_attr("another", 1)
    assert spent(study) == 90.0
    clock = Clock(study, 200.0)
    assert clock.before == 90.0
    assert 80 < clock.left < 110  # the report needs some of it
    clock.tick(now=True)
    assert spent(study) == pytest.approx(90.0, abs=1)
    over = Clock(study, 60.0)
    assert over.is_over
    assert not Clock(study, None).is_over
    assert clock.begin <= time.time() < clock.end
