"""Calls side by side: in order, without gradients, and with the number of threads as before."""

import threading
import time

import pytest
import torch

from holdfast._torch.threads import side_by_side


@pytest.fixture(params=[1, 2, 3])
def cores(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


@torch.no_grad()
def test_results_are_in_order_and_have_no_gradients(cores):
    weight, names = torch.ones(2, requires_grad=True), set()

    def call(number):
        time.sleep(0.02 if number == 0 else 0.0)  # the first one is the last to end
        names.add(threading.current_thread().name)
        return number, (weight * number).requires_grad, torch.get_num_threads()

    found = list(side_by_side(call, range(7)))
    assert [number for number, *_ in found] == list(range(7))
    assert not any(gradients for _, gradients, _ in found)
    assert {threads for *_, threads in found} == {1}
    assert (len(names) > 1) == (cores > 1)


def test_an_error_is_raised_and_the_rest_is_left_out(cores):
    called = []

    def call(number):
        called.append(number)
        if number == 1:
            raise ValueError("one")
        return number

    with pytest.raises(ValueError, match="one"):
        list(side_by_side(call, range(100)))
    assert len(called) < 20


def test_a_caller_may_stop(cores):
    results = side_by_side(lambda number: number, range(100))
    assert next(results) == 0
    results.close()
