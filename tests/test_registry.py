import dataclasses

import pytest

from holdfast import Flow, registry
from holdfast.stages import Merging


def test_duplicates_raise():
    with pytest.raises(ValueError, match="already registered"):
        registry.register("flow", "merging", Merging, "", "another flow")
    with pytest.raises(ValueError, match="already registered"):
        registry.register("flow-2", "objective", Flow, "", "the same class")
    with pytest.raises(ValueError, match="a-z"):
        registry.register("Flow Two", "merging", Merging, "", "spelt badly")
    with pytest.raises(ValueError, match="stage"):
        registry.register("flow-2", "finishing", Merging, "", "no such stage")
    assert "flow-2" not in [entry.name for entry in registry.methods()]


def test_find_suggests():
    assert registry.find("RecAdamUpdate").name == "recadam"
    assert registry.find("L2_SP").name == "l2-sp"
    with pytest.raises(ValueError, match="did you mean 'mixout'"):
        registry.find("mixuot")
    with pytest.raises(ValueError, match="known: "):
        registry.find("xyzxyz")


def test_a_class_that_is_not_registered():
    @dataclasses.dataclass(frozen=True)
    class Mine(Merging):
        pass

    with pytest.raises(ValueError, match="not registered"):
        registry.entry_of(Mine())
