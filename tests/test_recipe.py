import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import (
    DFT,
    EWC,
    L2SP,
    LPFT,
    AdamWUpdate,
    Auto,
    Distill,
    Features,
    FinchUpdate,
    Flow,
    Full,
    LoopSettings,
    LoRA,
    Mixout,
    MoFOUpdate,
    RandomInit,
    RecAdamUpdate,
    Recipe,
    Rehearsal,
    SGDUpdate,
    SPDUpdate,
    WiseFT,
    registry,
)
from holdfast.anneal import Constant, Sigmoid
from holdfast.recipe import read_recipe
from holdfast.registry import STAGES


def test_the_default_is_plain_fine_tuning():
    recipe = Recipe()
    assert recipe.name == "standard"
    assert not recipe.needs_reference
    assert recipe == Recipe.preset("standard")
    assert recipe == Recipe(trainable=Full(), update=AdamWUpdate(), penalties=[])


def test_preset():
    recipe = Recipe.preset("recadam+flow+wise-ft")
    assert recipe == Recipe(objective=Flow(), update=RecAdamUpdate(), merging=WiseFT())
    assert recipe.name == "flow+recadam+wise-ft"
    assert Recipe.preset(recipe.name) == recipe
    assert Recipe.preset(" RecAdam + FLOW + WiSE_FT ") == recipe
    assert Recipe.preset("l2-sp+ewc").penalties == (L2SP(), EWC())


def test_a_preset_with_settings_names_recipes_that_have_them():
    asft = Recipe.preset("asft+wise-ft")
    assert asft.recall == Distill(strength=0.05, temperature=1.0)
    assert asft.name == "asft+wise-ft"
    assert Recipe.preset("dft+distill").name == "dft+distill"
    assert Recipe(objective=DFT(power=0.5), recall=asft.recall).name == "asft"
    assert Recipe(recall=Auto(strength=0.5)).name == "holdfast"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("recadm", "did you mean 'recadam'"),
        ("flow+wiseft2", "wise-ft"),
        ("mixout+lora", "both belong to the stage trainable"),
        ("recadam+mofo", "both belong to the stage update"),
        ("distill+rehearsal", "both belong to the stage recall"),
        ("lora+random-init+recadam", "LoRA"),
        ("", "unknown method ''"),
    ],
)
def test_bad_presets_say_why(names, message):
    with pytest.raises(ValueError, match=message):
        Recipe.preset(names)


def test_describe_has_a_line_a_stage():
    recipe = Recipe(update=RecAdamUpdate(pull=0.2), penalties=(L2SP(1.0), EWC(2.0)))
    lines = recipe.describe().splitlines()
    assert [line.split()[0] for line in lines] == [
        "trainable", "start", "objective", "recall", "update", "penalties", "penalties", "merging",
    ]  # fmt: skip
    assert "pull=0.2" in lines[4]


def test_wrong_slots_say_where_a_method_goes():
    with pytest.raises(TypeError, match="pass Flow as objective="):
        Recipe(update=Flow())
    with pytest.raises(TypeError, match=r"write Flow\(\)"):
        Recipe(objective=Flow)
    with pytest.raises(TypeError, match=r"Recipe\.preset"):
        Recipe(objective="flow")
    with pytest.raises(TypeError, match="penalties"):
        Recipe(penalties=[WiseFT()])
    with pytest.raises(ValueError, match="penalties must differ"):
        Recipe(penalties=[L2SP(1.0), L2SP(2.0)])
    assert Recipe(penalties=L2SP(1.0)) == Recipe(penalties=[L2SP(1.0)])


def test_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Recipe().update = SGDUpdate()


number = st.floats(0.01, 0.99)
recipes = st.builds(
    Recipe,
    trainable=st.one_of(
        st.builds(Full), st.builds(LPFT, l2=number), st.builds(Mixout, p=number),
        st.builds(LoRA, r=st.integers(1, 64), dropout=number),
    ),
    objective=st.builds(Flow, tau=st.one_of(number, st.just(math.inf), st.just("batch_median"))),
    recall=st.one_of(
        st.builds(Distill, strength=number, temperature=st.floats(1, 9)),
        st.builds(Rehearsal, ratio=number, anneal=st.builds(Constant, number)),
    ),
    update=st.one_of(
        st.builds(AdamWUpdate, lr=number, betas=st.tuples(number, number)),
        st.builds(SGDUpdate, momentum=number, layer_decay=st.floats(1, 3)),
        st.builds(RecAdamUpdate, pull=number, anneal=st.builds(Sigmoid, number, number)),
        st.builds(MoFOUpdate, fraction=number),
        st.builds(SPDUpdate, lam=number),
        st.builds(FinchUpdate, smoothing=number),
    ),
    penalties=st.lists(
        st.one_of(st.builds(L2SP, number), st.builds(EWC, number, st.booleans())),
        max_size=2, unique_by=type,
    ),
    merging=st.builds(WiseFT, alpha=number),
)  # fmt: skip


@given(recipes)
def test_round_trips(recipe):
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert list(recipe.to_dict()) == list(STAGES)


def test_short_forms():
    text = """
    objective: flow
    update: {name: recadam, pull: 0.2}
    penalties:
      - l2-sp
      - {name: ewc, strength: 3}
    """
    expected = Recipe(
        objective=Flow(), update=RecAdamUpdate(pull=0.2), penalties=[L2SP(), EWC(3.0)]
    )
    assert Recipe.from_yaml(text) == expected
    assert Recipe.from_yaml("") == Recipe()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("updates: adamw", "did you mean 'update'"),
        ("update: {name: recadam, pul: 1}", "did you mean 'pull'"),
        ("update: {name: wise-ft}", "belongs to the stage merging"),
        ("update: {name: recadam, pull: -1}", "update recadam: pull"),
        ("update: {pull: 1}", "with a name"),
        ("[1, 2", "not valid YAML"),
        ("just a word", "mapping"),
        ("update: !!python/object/apply:os.system ['true']", "not valid YAML"),
    ],
)
def test_bad_files_say_what_is_wrong(text, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Recipe.from_yaml(text)


def test_cross_stage_checks_say_why():
    with pytest.raises(ValueError, match="LoRA"):
        Recipe(trainable=LoRA(), start=RandomInit(), update=RecAdamUpdate())
    with pytest.raises(ValueError, match="pull"):
        Recipe(start=RandomInit())
    Recipe(start=RandomInit(), penalties=[L2SP(1.0)])


def test_a_new_head_must_be_fitted_before_its_predictions_are_used():
    for name in ("flow", "distill", "ewc", "mas", "recadam+flow"):
        recipe = Recipe.preset(name)
        recipe.check_head(("classifier",))
        assert recipe.fitting_head(("classifier",)) == dataclasses.replace(recipe, trainable=LPFT())
        assert recipe.fitting_head(()) == recipe
    held = Recipe(Full(hold_statistics=True), objective=Flow())
    assert held.fitting_head(("fc",)).trainable == LPFT(hold_statistics=True)
    message = r"classifier is new .* alone first, with the preset linear-probe, and start from"
    with pytest.raises(ValueError, match=f"Flow uses .* {message}"):
        Recipe.preset("lora+flow").check_head(("classifier",))
    for name in ("lp-ft+flow", "recadam", "lora"):
        Recipe.preset(name).check_head(("classifier",))
    recadam = RecAdamUpdate(importance="mas")
    with pytest.raises(ValueError, match="RecAdamUpdate uses the pretrained"):
        Recipe(trainable=LoRA(), update=recadam).check_head(("classifier",))


def test_settings_are_rounded_for_people():
    method = Features(strength=0.1 * 3)
    assert str(method).startswith("Features(strength=0.3, ")
    assert repr(method).startswith("Features(strength=0.30000000000000004, ")
    assert str(WiseFT()) == repr(WiseFT())


def test_other_settings_by_dotted_name():
    recipe = Recipe.preset("ewc+l2-sp+wise-ft")
    changed = recipe.with_settings({"penalties.strength": 0.5, "merging.alpha": 0.1})
    assert [penalty.strength for penalty in changed.penalties] == [0.5, 0.5]
    assert changed.merging.alpha == 0.1
    assert recipe == Recipe.preset("ewc+l2-sp+wise-ft")
    some = recipe.with_settings({"penalties.samples": 7})  # L2-SP has no samples
    assert [vars(penalty).get("samples") for penalty in some.penalties] == [7, None]
    assert {"penalties.strength", "merging.alpha", "update.lr"} <= set(recipe.settings)
    with pytest.raises(ValueError, match=r"has no setting 'merging.alfa'; did you mean 'merging."):
        recipe.with_settings({"merging.alfa": 1})
    with pytest.raises(ValueError, match=r"has no setting 'update.pull'"):  # of RecAdam
        recipe.with_settings({"update.pull": 1})


@pytest.mark.parametrize("entry", registry.methods(), ids=lambda entry: entry.name)
def test_an_unknown_setting_names_the_nearest(entry):
    known = [f.name for f in dataclasses.fields(entry.cls) if f.init]
    wrong = f"{known[0]}_" if known else "strength"
    hint = f"did you mean.* '{known[0]}'" if known else ""
    with pytest.raises(TypeError, match=f"{entry.cls.__name__} has no setting '{wrong}'.*{hint}"):
        entry.cls(**{wrong: 1})
    method = {"name": entry.name, wrong: 1}
    with pytest.raises(ValueError, match=f"{entry.stage} {entry.name}: .*'{wrong}'.*{hint}"):
        Recipe.from_dict({entry.stage: [method] if entry.stage == "penalties" else method})


def test_unknown_settings_outside_of_methods():
    with pytest.raises(TypeError, match="RecAdamUpdate has no setting 't_0'; did you mean 't0'"):
        RecAdamUpdate(t_0=1)
    with pytest.raises(TypeError, match="no setting 'xyz'; known: alpha, dora, dropout, r, rslora"):
        LoRA(xyz=1)
    with pytest.raises(TypeError, match="LoRA has no setting 'plotted'"):
        LoRA(plotted=())
    with pytest.raises(TypeError, match="Recipe has no setting 'updates'; did you mean 'update'"):
        Recipe(updates=AdamWUpdate())
    with pytest.raises(TypeError, match="LoopSettings has no setting 'clipnorm'; did you mean"):
        LoopSettings(clipnorm=1.0)
    with pytest.raises(TypeError, match="Sigmoid has no setting 'T0'"):
        Sigmoid(k=1.0, T0=3)
    with pytest.raises(ValueError, match="update recadam: Sigmoid has no setting 'kk'"):
        Recipe.from_yaml("update: {name: recadam, anneal: {name: Sigmoid, kk: 1}}")
    with pytest.raises(ValueError, match="has no setting '3'"):
        Recipe.from_yaml("update: {name: recadam, 3: 1}")


def test_nested_yaml_is_refused_in_one_sentence(tmp_path):
    deep, bomb = tmp_path / "deep.yaml", tmp_path / "bomb.yaml"
    deep.write_text("update: " + "[" * 3000)
    levels = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 40)]
    bomb.write_text("\n".join(["a0: &a0 [x]", *levels, "update: *a39"]))
    with pytest.raises(ValueError, match=r"deep.yaml: the recipe is not valid YAML"):
        read_recipe(str(deep))
    with pytest.raises(ValueError, match=r"bomb.yaml: the recipe is not valid YAML"):
        read_recipe(str(bomb))
    bomb.write_text(bomb.read_text().replace("a0: &a0 [x]", "merging: &a0 [x]"))
    with pytest.raises(ValueError, match=r"bomb.yaml: "):
        read_recipe(str(bomb))
    (tmp_path / "list.yaml").write_text("[1, 2]")
    with pytest.raises(ValueError, match=r"list.yaml: a recipe must be a mapping"):
        read_recipe(str(tmp_path / "list.yaml"))
