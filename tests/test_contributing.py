"""The worked example of CONTRIBUTING.md keeps all promises of a method."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch

from holdfast import Recipe, Reference, registry

sys.path.insert(0, str(Path(__file__).parent / "contract"))
import test_contract as contract
from setting import recipe_of, train

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def entry(monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("holdfast.merging.trim")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(file, module.__dict__)
    exec(line, {"register": registry.register, "Trim": module.Trim})
    return registry.find("trim")


def test_the_example_is_a_method_like_any_other(entry, tmp_path):
    assert Recipe.preset("flow+trim").merging == entry.cls()
    contract.test_the_neutral_setting_is_the_stages_identity_to_the_bit(entry)
    contract.test_dtype_and_device_are_kept(entry, torch.bfloat16, "cpu")
    contract.test_groups_and_frozen_parameters(entry)
    contract.test_resume_at_a_random_step(entry, tmp_path)
    contract.test_the_recipe_file_says_all_of_it(entry)
    contract.test_it_is_documented(entry)
    for other in registry.methods():
        if other.stage not in ("merging", "start"):
            train(recipe_of(entry.cls(), other.cls()))


def test_it_does_what_it_says(entry):
    model = torch.nn.Linear(10, 10)
    reference = Reference.of(model)
    model.weight.data += torch.arange(100.0).reshape(10, 10)
    entry.cls(density=0.25).merge(model, reference)
    assert ((model.weight - reference["weight"]) != 0).sum() == 25
    with pytest.raises(ValueError, match="density"):
        entry.cls(density=0.0)
