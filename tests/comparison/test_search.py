"""What ``tune`` searches."""

from dataclasses import replace

import pytest

from comparison.small_plan import make_plan
from holdfast import RecAdamUpdate, Recipe
from holdfast.anneal import Constant, Linear
from holdfast.comparison.contenders import space_of, suggest
from holdfast.comparison.goals import goals_in
from holdfast.comparison.search import Search, Tuning
from holdfast.stages import SearchRange
from report.sample_results import run


def space(name, given=None, lr=1e-3):
    return space_of(Recipe.preset(name), lr, lambda: 2.0, given or {})


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("standard", ["lr"]),
        ("recadam", ["lr", "update.pull", "update.t0", "update.width"]),
        ("flow+wise-ft", ["lr", "objective.tau", "merging.alpha"]),
        ("mofo+lora", ["lr", "trainable.r", "update.fraction"]),
        ("spd", ["lr", "update.lam"]),
        ("finch", ["lr", "update.cap"]),
        ("l2-sp", ["lr", "penalties.strength"]),
        ("holdfast+wise-ft", ["lr", "recall.strength", "merging.alpha"]),
    ],
)
def test_a_recipe_has_the_settings_of_its_methods(name, settings):
    assert sorted(space(name)) == sorted(settings)


def test_defaults_lie_within():
    for name in (
        "recadam+flow+wise-ft",
        "mofo+lora",
        "spd",
        "finch",
        "ewc",
        "distill+mixout",
        "sfa",
    ):
        for setting, found in space(name).items():
            assert found.low <= found.default <= found.high, setting


def test_a_gamma_is_searched_instead_of_the_pull():
    found = space_of(Recipe(update=RecAdamUpdate(gamma=50.0)), 1e-3, lambda: None, {})
    assert sorted(found) == ["lr", "update.gamma", "update.t0", "update.width"]
    gamma = found["update.gamma"]
    assert (gamma.low, gamma.high, gamma.default) == (pytest.approx(3), pytest.approx(1000), 50)


def test_what_an_annealing_stands_for_is_not_searched():
    found = space_of(Recipe(update=RecAdamUpdate(anneal=Linear(100))), 1e-3, lambda: None, {})
    assert sorted(found) == ["lr", "update.pull"]
    found = space_of(Recipe(update=RecAdamUpdate(anneal=Constant(1.0))), 1e-3, lambda: None, {})
    assert sorted(found) == ["lr"]  # no recall at all


@pytest.mark.parametrize(
    ("recipe", "lr", "centre"),
    [
        ("holdfast", None, 3e-4),  # 1e-3 for many samples; here are 12, each of them 1.5 times
        ("holdfast", 1e-4, 1e-4),
        ("standard", None, 3e-4),
        ("lora", None, 1.8e-3),
    ],
)
def test_the_learning_rate_is_searched_around_its_default(recipe, lr, centre, tmp_path):
    pytest.importorskip("optuna", reason="the cli extra is not installed")
    plan = make_plan(tmp_path, recipes=(recipe,), seeds=(0,))
    plan = replace(plan, training=replace(plan.training, lr=lr))
    found = Search(plan, Tuning(recipe), tmp_path / "trials", str(tmp_path / "study.log"), "a")
    assert found.contenders[recipe].space["lr"].default == centre


def test_a_training_signal_is_no_goal():
    moved = {"context-free": 0.1, "GSM8K": 0.2, "prose": 0.3}  # GSM8K is the target
    one = run("flow", tests={}, kl=moved)
    assert goals_in(one)[1] == 0.1
    assert goals_in(replace(one, trained_on=("context-free",)))[1] == 0.3


def test_own_ranges_come_instead():
    found = space("recadam", {"update.pull": (0.5, 0.8)})["update.pull"]
    assert (found.low, found.high, found.default) == (0.5, 0.8, 0.5)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"update.pul": (0.1, 0.2)}, "did you mean 'update.pull'"),
        ({"objective.tau": (0.1, 0.2)}, "no setting 'objective.tau'"),
        ({"update.pull": (0.1,)}, "two ends"),
        ({"update.pull": (0.2, 0.1)}, "low < high"),
        ({"update.pull": (0.0, 0.1)}, "low > 0"),
    ],
)
def test_a_range_that_is_none(given, words):
    with pytest.raises(ValueError, match=words):
        space("recadam", given)


def test_whole_numbers_are_drawn_whole():
    optuna = pytest.importorskip("optuna", reason="the cli extra is not installed")
    trial = optuna.create_study().ask()
    rank = suggest(space("lora")["trainable.r"], trial, "trainable.r")
    assert isinstance(rank, int)
    assert 1 <= rank <= 128
    assert isinstance(suggest(SearchRange(0.1, 1.0, 0.5), trial, "x"), float)
