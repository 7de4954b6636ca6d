"""Tests that ask a causal language model for likelihoods; all tests of a model ask together.

Together they need fewer forward passes, because more of these are full, and equal requests of two
tests run once.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from holdfast.io.encoding import Continuation
from holdfast.io.models import Loaded
from holdfast.scoring.likelihood import Likelihood, check_requests, log_likelihoods


class Asking:
    """A test by the likelihoods of some continuations."""

    name: str

    def requests(self, loaded: Loaded) -> Sequence[Continuation]:
        """Return what to ask a causal language model."""
        raise NotImplementedError(f"{type(self).__name__} has no requests")

    def graded(self, loaded: Loaded, found: Sequence[Likelihood]) -> Any:
        """Return the result, given the likelihoods of the requests."""
        raise NotImplementedError(f"{type(self).__name__} does not grade likelihoods")

    def unfit(self, loaded: Loaded) -> str:
        """Return why the base cannot take the test, which is then left out; empty if it can."""
        return ""

    def run(self, loaded: Loaded, *, progress: bool) -> Any:
        """Test one model: first the base, then the tuned model."""
        if loaded.kind != "causal_lm":
            return self.run_on_another_kind(loaded, progress=progress)
        requests = self.requests(loaded)
        found = log_likelihoods(loaded, requests, self.name, progress=progress)
        return self.graded(loaded, found)

    def run_on_another_kind(self, loaded: Loaded, *, progress: bool) -> Any:
        """Test a model that is no causal language model; raises unless a class supports it."""
        return log_likelihoods(loaded, (), self.name)


def run_all(tests: Sequence[Any], loaded: Loaded, *, progress: bool) -> list[Any]:
    """Return the results of tests, in their order. Those that ask together run first."""
    asking = [test for test in tests if loaded.kind == "causal_lm" and _only_asks(test)]
    asked = [test.requests(loaded) for test in asking]
    for test, requests in zip(asking, asked, strict=True):
        check_requests(requests, test.name)
    name = ", ".join(test.name for test in asking[:2])
    if len(asking) > 2:
        name += f" and {len(asking) - 2} more"
    every = [request for requests in asked for request in requests]
    found = iter(log_likelihoods(loaded, every, name, progress=progress) if every else ())
    graded = {
        id(test): test.graded(loaded, [*islice(found, len(requests))])
        for test, requests in zip(asking, asked, strict=True)
    }
    return [
        graded[id(test)] if id(test) in graded else test.run(loaded, progress=progress)
        for test in tests
    ]


def _only_asks(test: Any) -> bool:
    """Whether a test has no ``run`` of its own."""
    return isinstance(test, Asking) and type(test).run is Asking.run
