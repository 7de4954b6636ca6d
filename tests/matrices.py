"""Matrices of tests: `make test` runs a sample of the cases, `make soak` all of them."""

import pytest


def sampled(cases, sample):
    """The cases as parameters; those outside the sample are marked as soak."""
    cases = list(cases)
    assert all(case in cases for case in sample)
    return [case if case in sample else pytest.param(*_row(case), marks=pytest.mark.soak)
            for case in cases]  # fmt: skip


def _row(case):
    return case if isinstance(case, tuple) else (case,)
