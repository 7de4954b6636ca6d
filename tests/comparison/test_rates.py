"""Without a learning rate, all recipes get that of the default recipe."""

import logging
from dataclasses import replace

import pytest
from torch import nn

pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.small_plan import make_plan
from comparison.tiny import save_images, save_resnet
from holdfast import LoRA, Recipe
from holdfast.comparison.plan import Plan
from holdfast.comparison.rates import default_lr, with_rates
from holdfast.comparison.worker import Worker
from holdfast.io.models import Loader

RECIPES = ("standard", "holdfast", "recadam+wise-ft", "hft", "lora")


@pytest.fixture
def plan(tmp_path):
    plan = make_plan(tmp_path, recipes=RECIPES, seeds=(0,))
    return replace(plan, training=replace(plan.training, lr=None))


def rates_of(plan):
    return {spec.recipe: spec.training.lr for spec in plan.runs}


def test_every_recipe_gets_the_rate_of_its_trainable_set(plan, caplog):
    caplog.set_level(logging.INFO, "holdfast")
    rates = rates_of(with_rates(plan))
    assert rates["holdfast"] > 2e-5
    assert rates == {**dict.fromkeys(RECIPES, rates["holdfast"]), "lora": 6 * rates["holdfast"]}
    assert with_rates(plan).rates == rates  # which results.json holds
    said = [record for record in caplog.records if "rows are cut" not in record.message]
    assert not said  # not what the default recipe would choose for another one


def test_another_rate_is_another_run(plan, monkeypatch):
    before = with_rates(plan)
    monkeypatch.setattr("holdfast.hosts.job.DEFAULT_RECIPE", "standard")
    after = with_rates(plan)
    assert set(rates_of(after).values()) == {2e-5}
    assert not {spec.id for spec in before.runs} & {spec.id for spec in after.runs}


def test_a_rate_that_is_given_counts(plan, tmp_path):
    fixed = replace(plan, recipes=("standard", "lora"))
    given = replace(fixed, training=replace(plan.training, lr=1e-4))
    assert with_rates(given) is given
    grid = replace(fixed, grid={"lr": (1e-4, 1e-3)})
    assert with_rates(grid) is grid
    (tmp_path / "own.yaml").write_text("update: {name: adamw, lr: 1.0e-4}\n")
    mixed = with_rates(replace(plan, recipes=("standard", str(tmp_path / "own.yaml"))))
    assert list(mixed.rates) == ["standard"]


def test_a_recipe_that_depends_on_the_model_is_resolved(plan, monkeypatch):
    """Other defaults of a recipe, after an upgrade, are other runs."""
    plan = replace(plan, training=replace(plan.training, lr=1e-4), recipes=("standard", "holdfast"))
    before = with_rates(plan)
    assert list(before.resolved) == ["holdfast"]
    assert before.resolved["holdfast"]["recall"]["name"] == "self-replay"
    assert with_rates(before) is before
    other = Recipe.preset("rehearsal").recall
    recipe = type(Recipe.preset("holdfast").recall)
    monkeypatch.setattr(recipe, "resolve", lambda self, found, *_: replace(found, recall=other))
    after = with_rates(plan)
    same = {spec.id for spec in before.runs} & {spec.id for spec in after.runs}
    assert [name.partition("-")[0] for name in same] == ["standard"]


def test_the_inputs_are_checked_before_the_model_is_loaded(plan, monkeypatch):
    monkeypatch.setattr(Loader, "load", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(FileNotFoundError, match=r"gone\.jsonl"):
        with_rates(replace(plan, target="gone.jsonl"))


def test_a_model_of_an_unknown_kind(caplog):
    assert default_lr(Recipe(), nn.Linear(2, 2), ()) == 2e-5
    assert not caplog.records


def test_settings_that_the_default_recipe_would_refuse(tmp_path):
    model, data = save_resnet(tmp_path / "resnet"), save_images(tmp_path / "train")
    plan = Plan(model, data, data, recipes=("standard",), seeds=(0,))
    (rate,) = rates_of(with_rates(plan)).values()
    adapters = Recipe(trainable=LoRA(dora=True))
    assert default_lr(adapters, Loader().load(model), ()) == 6 * rate


def test_runs_of_another_size_choose_their_own_rate(tmp_path):
    """As ``finetune`` would: the rate of the plan is not that of six epochs."""
    plan = make_plan(tmp_path, recipes=("standard",), seeds=(0,), updates=None)
    plan = replace(plan, training=replace(plan.training, lr=None, epochs=1.0))
    common = with_rates(replace(plan, options={"epochs": 6}))
    assert common.rates == {"standard": 1e-4}  # a tenth of 1e-3 is the least
    assert [spec.training.lr for spec in common.runs] == [1e-4]
    same = with_rates(replace(plan, training=replace(plan.training, epochs=6)))
    assert same.rates == common.rates
    grid = with_rates(replace(plan, grid={"epochs": (1, 6)}))
    assert grid.rates == {}
    given = replace(plan, grid={"epochs": (1, 6)}, rates={"standard": 3e-4})
    assert [spec.training.lr for spec in given.runs] == [3e-4, 3e-4]
    one, six = (Worker(grid, tmp_path / "runs")(spec).resolved["update"] for spec in grid.runs)
    assert (one["lr"], six["lr"]) == (4.5e-4, 1e-4)
