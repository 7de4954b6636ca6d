"""The worked example of CONTRIBUTING.md keeps all promises of a method: one file and one line."""

import re
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from holdfast import Recipe, Run, registry
from holdfast.comparison.contenders import space_of

sys.path.insert(0, str(Path(__file__).parent / "contract"))
import test_contract as contract
from setting import ENTRIES, Vectors, recipe_of, train

PAGE = Path(__file__).parents[1] / "CONTRIBUTING.md"


@pytest.fixture
def entry(monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    file, line = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    module = types.ModuleType("holdfast.methods.trim")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(file, module.__dict__)
    exec(line, {"register": registry.register, "Trim": module.Trim})
    return registry.find("trim")


def make_run(*penalties):
    options = {"lr": 0.01, "task": "classification", "progress": False}
    return Run(Recipe(penalties=penalties), Vectors.make_model(), Vectors.make_data(), **options)


def test_the_example_is_a_method_like_any_other(entry, tmp_path):
    assert Recipe.preset("flow+trim").penalties == (entry.cls(),)
    contract.test_the_neutral_setting_is_the_stages_identity_to_the_bit(entry)
    contract.test_dtype_and_device_are_kept(entry, torch.bfloat16, "cpu")
    contract.test_groups_and_frozen_parameters(entry)
    contract.test_resume_at_a_random_step(entry, tmp_path)
    contract.test_the_recipe_file_says_all_of_it(entry)
    contract.test_it_is_documented(entry)
    for other in ENTRIES:
        if other.stage not in ("penalties", "start"):
            train(recipe_of(entry.cls(), other.cls()))


def test_it_keeps_the_largest_changes(entry):
    run = make_run(entry.cls(density=0.25))
    optimizer = run.make_optimizer(2)
    for _ in range(2):
        for p in run.model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
    changed = run.model.stem.weight != run.anchors["stem.weight"]
    assert changed.sum() == 10  # of 40
    with pytest.raises(ValueError, match="density"):
        entry.cls(density=0.0)


def test_tune_searches_its_setting(entry):
    space = space_of(Recipe.preset("trim"), 1e-3, lambda: None, {})
    assert space["penalties.density"].default == 0.2


def test_hosts_log_its_value(entry):
    run = make_run(entry.cls())
    run.make_optimizer(2)
    assert run.log() == {"trim/distance": 0.0}


def test_zero_may_not_cut_its_tensors(entry):
    from holdfast.hosts._deepspeed import check_deepspeed

    plugin = SimpleNamespace(zero_stage=2, get_value=lambda *_: None)
    accelerator = SimpleNamespace(deepspeed_plugin=plugin, num_processes=1)
    with pytest.raises(ValueError, match="Trim compares the weights of a whole matrix"):
        check_deepspeed(accelerator, make_run(entry.cls()))
    check_deepspeed(accelerator, make_run(entry.cls(density=1.0)))
