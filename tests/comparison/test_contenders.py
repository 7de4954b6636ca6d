"""Which recipes a search has, and that every method's settings can be searched."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("optuna", reason="the cli extra is not installed")

from comparison.small_plan import make_plan
from comparison.tiny import save_bert
from holdfast import Recipe, registry
from holdfast.comparison.contenders import (
    RECIPE,
    Contender,
    contenders_of,
    every_recipe,
    fitting,
    space_of,
)
from holdfast.comparison.plan import Measuring, Plan, Training
from holdfast.comparison.rungs import FIRST
from holdfast.comparison.search import Search, Tuning
from holdfast.comparison.study import counted
from holdfast.comparison.tuning import tuned_of
from holdfast.hosts.job import resolved_quietly
from holdfast.recipe import read_recipe

ENTRIES = registry.methods()
#: Methods that differ in kind, one per slot; the soak has all.
SAMPLE = ("standard", "lora", "flow", "distill", "mofo", "l2-sp", "wise-ft")


def test_all_are_the_presets_every_method_and_combinations():
    names = every_recipe()
    alone = {entry.name for entry in ENTRIES if entry.cls.stands_alone}
    assert {*registry.PRESETS, *alone} <= {*names}
    assert "adapter" not in names  # its presets are: oft, hra, …
    assert any("+" in name for name in names)
    assert len({*names}) == len(names)


def test_every_method_fits_once_or_is_left_out_with_a_reason(tmp_path):
    fits, unfit = fitting(make_plan(tmp_path), ("all",))
    recipes = [Recipe.preset(name) for name in fits]
    assert all(recipes.count(one) == 1 for one in recipes)  # full, adamw, … are standard
    assert "holdfast" in fits
    assert "self-replay" not in fits  # holdfast is resolved to it
    recipes.append(Recipe.preset("self-replay"))
    for entry in ENTRIES:
        if entry.name not in unfit and entry.cls.stands_alone:
            assert Recipe.preset(entry.name) in recipes
    assert "old_data=" in unfit["rehearsal"]
    assert "a recipe trains one" in unfit["model-stock"]
    assert "causal_lm" in unfit["lp-ft"]


def test_data_and_task_decide(tmp_path):
    rows = [{"text": f"w{i % 20}", "label": i / 7} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = str(tmp_path / "rows.jsonl")
    plan = Plan(save_bert(tmp_path / "bert"), file, file, old_data=file, head="regression")
    fits, unfit = fitting(plan, ("all",))
    assert "rehearsal" in fits
    assert "lp-ft" in fits
    for name in ("dft", "talr", "eaft", "stm"):
        assert "use another objective" in unfit[name]
    assert "class predictions" in unfit["ewc"]
    assert "causal language model" in unfit["self-replay"]


def test_patience_leaves_out_what_acts_at_the_end(tmp_path):
    plan = make_plan(tmp_path)
    training = replace(plan.training, validation=0.2, patience=2)
    unfit = fitting(replace(plan, training=training), ("all",))[1]
    ending = [entry.name for entry in ENTRIES if getattr(entry.cls, "acts_at_end", False)]
    assert ending
    assert all("train without patience" in unfit[name] for name in ending)


def test_own_recipes_come_beside_all_of_them(tmp_path):
    (tmp_path / "mine.yaml").write_text("merging: {name: wise-ft, alpha: 0.3}\n")
    mine = str(tmp_path / "mine.yaml")
    fits, _ = fitting(make_plan(tmp_path), (mine, "all"))
    assert fits[0] == mine
    assert "standard" in fits
    assert "wise-ft" in fits  # with other settings
    (tmp_path / "same.yaml").write_text("merging: {name: wise-ft}\n")
    same = str(tmp_path / "same.yaml")
    assert "wise-ft" not in fitting(make_plan(tmp_path), (same, "all"))[0]
    assert fitting(make_plan(tmp_path), ("flow", mine)) == (("flow", mine), {})


def test_two_recipes_of_one_name_cannot_be_told_apart(tmp_path):
    (tmp_path / "lora.yaml").write_text("trainable: {name: lora, r: 3}\n")
    file = str(tmp_path / "lora.yaml")
    with pytest.raises(ValueError, match=r"lora\.yaml and lora have the same name.*rename"):
        fitting(make_plan(tmp_path), ("all", file))


def test_a_recipe_that_cannot_be_resolved_is_left_out(tmp_path, monkeypatch):
    def resolved(recipe, *given):
        if recipe == Recipe.preset("flow"):
            raise ValueError("it does not fit what was chosen")
        return resolved_quietly(recipe, *given)

    monkeypatch.setattr("holdfast.comparison.contenders.resolved_quietly", resolved)
    fits, unfit = fitting(make_plan(tmp_path), ("all",))
    assert "flow" not in fits
    assert unfit["flow"] == "it does not fit what was chosen"


def test_settings_of_several_recipes_are_told_apart():
    recipes = {name: (Recipe.preset(name), 1e-3) for name in ("recadam", "l2-sp", "ewc")}
    found = contenders_of(recipes, lambda: 2.0, {"penalties.strength": (1.0, 2.0), "lr": (0.1, 1)})
    parameters = [name for one in found.values() for name in one.defaults]
    assert parameters.count(RECIPE) == 3
    assert len({*parameters}) == len(parameters) - 2
    for name in ("l2-sp", "ewc"):
        assert (found[name].space["penalties.strength"].low) == 1.0
    drawn = {**found["ewc"].defaults}
    assert found["ewc"].values_of(drawn).keys() == found["ewc"].space.keys()
    assert {one.space["lr"].high for one in found.values()} == {1}
    with pytest.raises(ValueError, match=r"no recipe has a setting 'update\.pul'.*update\.pull"):
        contenders_of(recipes, lambda: 2.0, {"update.pul": (0.1, 0.2)})


def test_one_recipe_has_plain_names():
    one = Contender("recadam", Recipe.preset("recadam"), space_of(Recipe(), 1e-3, lambda: 1.0, {}))
    assert one.defaults == {"lr": 1e-3}
    assert one.values_of({"lr": 0.5}) == {"lr": 0.5}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"recipes": ()}, "at least one recipe"),
        ({"recipes": ("flow", "flow")}, "'flow' twice"),
        ({"recipes": ("flow", "recadm")}, "did you mean 'recadam'"),
        ({"budget": "soon"}, "budget must be a duration"),
        ({"trials": 0}, "trials must be at least 1"),
    ],
)
def test_a_search_that_is_none(given, words):
    with pytest.raises(ValueError, match=words):
        Tuning(**given)


def test_limits_by_default():
    assert Tuning().most_trials(1) == 20
    assert not Tuning().halves
    assert Tuning(("flow", "dft")).most_trials(2) == 6
    assert Tuning("all").most_trials(30) == 90
    assert Tuning(budget="1h").most_trials(1) == float("inf")
    assert Tuning(budget="1h", trials=7).most_trials(30) == 7
    assert all(t.halves for t in (Tuning("all"), Tuning(("flow", "dft")), Tuning(budget="1h")))


def search_over(names, folder, *, trials, updates=4, **options):
    plan = make_plan(folder, updates=updates)
    given = {"penalties.samples": 4, "recall.length": 16}
    plan = replace(plan, measuring=replace(plan.measuring, context_free=0), options=given)
    tuning = Tuning(names, trials=trials, alphas=(1.0,), **options)
    return Search(plan, tuning, folder / "trials", str(folder / "study.log"), "one"), plan, tuning


def check_every_recipe_got_its_trial(search, plan, tuning):
    search.run()
    found = tuned_of(search.study, tuning, plan)
    assert {one.recipe: one.error for one in found.recipes if one.error} == {}
    assert [one.recipe for one in found.recipes] == [read_recipe(n)[0] for n in search.names]
    looks = [t for t in counted(search.study) if "first_look" in t.user_attrs]
    assert [t.params[RECIPE] for t in looks] == [*search.names]
    assert all(t.user_attrs["default"] for t in looks)
    assert all(FIRST in t.user_attrs or t.state.name == "PRUNED" for t in looks)
    assert not search.paused
    assert all(t.state.is_finished() for t in counted(search.study))
    return found


# Nine trainings, one per slot and two draws: fewer would not show which third goes on.
def test_every_recipe_is_tried_and_the_best_third_goes_on(tmp_path):
    search, plan, tuning = search_over(SAMPLE, tmp_path, trials=len(SAMPLE) + 2)
    found = check_every_recipe_got_its_trial(search, plan, tuning)
    looks = [t for t in counted(search.study) if "first_look" in t.user_attrs]
    merits = [t.user_attrs[FIRST]["merit"] for t in looks]
    best = sorted(merits)[-(len(SAMPLE) // 3) :]
    for trial in looks:
        is_best = trial.user_attrs[FIRST]["merit"] in best
        is_standard = trial.params[RECIPE] == "standard"
        assert ("goes_on" in trial.user_attrs) == (is_best or is_standard)
        if is_standard:  # the others are compared with it
            assert not is_best
            assert trial.state.name == "COMPLETE"
    assert found.standard is not None
    assert found.taken.rung == 1.0
    assert found.taken.recipe in SAMPLE
    assert Recipe.from_yaml(found.to_yaml()).update.lr == found.taken.values["lr"]
    said = " ".join(found.sentences())
    assert f"Found ({found.taken.recipe}, its defaults)" in said
    assert "Stopped early at 1/9 of the updates: " in said
    (section,) = (s for s in found.document().sections if s.title == "Recipe by recipe")
    assert len(section.tables[0].rows) == len(SAMPLE)


@pytest.mark.soak
def test_every_registered_method_is_searched(tmp_path):
    """Each method that fits gets a first look and draws of its settings; nothing crashes."""
    plan = make_plan(tmp_path)
    fits, _ = fitting(plan, ("all",))
    search, plan, tuning = search_over("all", tmp_path, trials=2 * len(fits), updates=3)
    assert search.names == fits
    check_every_recipe_got_its_trial(search, plan, tuning)


@pytest.mark.soak
def test_every_method_of_a_classifier_is_searched(tmp_path):
    rows = [{"text": f"w{i % 20}", "label": i % 2} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = str(tmp_path / "rows.jsonl")
    # PEFT warns of fewer features than a block of OFT has.
    bert = save_bert(tmp_path / "bert", num_hidden_layers=3, hidden_size=32, intermediate_size=32)
    plan = Plan(
        bert, file, file, old_data=file,
        options={"penalties.samples": 4},
        training=Training(max_updates=3, batch_size=4), measuring=Measuring(context_free=0),
    )  # fmt: skip
    tuning = Tuning("all", trials=40, alphas=())
    search = Search(plan, tuning, tmp_path / "trials", str(tmp_path / "study.log"), "one")
    search.run()
    found = tuned_of(search.study, tuning, plan)
    assert {one.recipe: one.error for one in found.recipes if one.error} == {}
