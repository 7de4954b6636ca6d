"""What every method of the registry promises, whoever wrote it."""

import dataclasses
import random

import pytest
import torch
from setting import (
    ENTRIES,
    NAMES,
    WRITING,
    Images,
    Stopped,
    Texts,
    Vectors,
    assert_same_bits,
    recipe_of,
    setting_of,
    stop_at,
    train,
)

from holdfast import TALR, Mixout, RecAdamUpdate, Recipe, Run
from holdfast.registry import PRESETS, methods
from holdfast.stages import Criterion

every_method = pytest.mark.parametrize("entry", ENTRIES, ids=NAMES)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if e.cls.neutral is not None], ids=lambda e: e.name
)
def test_the_neutral_setting_is_the_stages_identity_to_the_bit(entry):
    neutral = entry.cls(**entry.cls.neutral)
    plain = train(Recipe(), setting=setting_of(entry))
    assert_same_bits(train(recipe_of(neutral)), plain)


def test_methods_without_a_neutral_setting_are_few():
    """What changes the parameters or the start itself; all others have one."""
    without = {e.name for e in ENTRIES if e.cls.neutral is None}
    assert without == {"linear-probe", "lp-ft", "lora", "adapter", "random-init", "sgd"}


@every_method
def test_it_changes_something(entry):
    """Every default does more than nothing, but for the identities."""
    identities = {"full", "pretrained", "uniform", "no-recall", "adamw", "keep"}
    setting = setting_of(entry)
    ours, plain = train(recipe_of(entry.cls())), train(Recipe(), setting=setting)
    same = torch.equal(*(setting.outputs(model.eval()) for model in (ours, plain)))
    assert same == (entry.name in identities)


@every_method
@pytest.mark.parametrize(
    "cut",
    [(2, 3), *(pytest.param(cut, marks=pytest.mark.soak) for cut in [(3, 2), (1, 6)])],
    ids=str,
)
def test_how_an_update_is_cut_does_not_matter(entry, cut):
    # Mixout draws a mask for each forward pass, as dropout does, and TALR takes a median over each
    # micro-batch: what is the same is the rest.
    method = {Mixout: Mixout(p=0.0), TALR: TALR(tau=1.0)}.get(entry.cls) or entry.cls()
    recipe = recipe_of(method)
    results = []
    for batch_size, accumulate in [(6, 1), cut]:
        model = setting_of(entry).make_model(dropout=0.0, statistics=False)
        model = train(recipe, model, batch_size=batch_size, accumulate=accumulate)
        results.append(model.state_dict())
    # At θ* the gradients of a divergence are rounding errors, which Adam amplifies.
    tolerance = 1e-6 if entry.name in WRITING else 1e-9
    for name, tensor in results[0].items():
        assert (tensor - results[1][name]).abs().max() <= tolerance, name


@every_method
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_dtype_and_device_are_kept(entry, dtype, device):
    model = setting_of(entry).make_model(dtype).to(device)
    before = {name: (t.dtype, t.device) for name, t in model.state_dict().items()}
    start = {name: p.detach().cpu().clone() for name, p in model.named_parameters()}
    model, moved = train(recipe_of(entry.cls()), model), False
    for name, p in model.named_parameters():
        assert p.isfinite().all(), name
        moved = moved or name not in start or not torch.equal(p.cpu(), start[name])
        assert p.device.type == device
        if "lora" not in name:  # PEFT keeps adapters of half-precision models in float32
            assert p.dtype == dtype
    assert moved
    if not getattr(entry.cls, "keeps_base", False):
        assert {name: (t.dtype, t.device) for name, t in model.state_dict().items()} == before


@every_method
def test_it_says_whether_it_changes_the_loss(entry):
    setting = setting_of(entry)
    for settings in [{}, *([] if entry.cls.neutral is None else [entry.cls.neutral])]:
        run = Run(
            recipe_of(entry.cls(**settings)), setting.make_model(), setting.make_data(), lr=0.01,
            progress=False, **setting.options(torch.float64),
        )  # fmt: skip
        criterion = run.criterion
        changed = type(criterion) is not Criterion or criterion.recall.uses_outputs
        changed = changed or bool(criterion.columns)
        assert any(method.changes_loss for _, method in run.recipe) == changed


@pytest.mark.parametrize("entry", methods("trainable"), ids=lambda e: e.name)
def test_a_run_begins_at_its_anchors(entry):
    """What is fitted before training, such as a head, belongs to θ*."""
    recipe = recipe_of(entry.cls(), RecAdamUpdate())
    model, data = Vectors.make_model(), Vectors.make_data()
    run = Run(recipe, model, data, lr=0.01, task="classification", progress=False)
    assert run.anchors.distance(run.model).total == 0


@every_method
def test_groups_and_frozen_parameters(entry):
    """With a learning rate for each layer; what the user froze stays to the bit."""
    setting = setting_of(entry)
    model = setting.make_model()
    first = setting.first_layer(model).requires_grad_(False)
    before = first.weight.detach().clone()
    recipe = recipe_of(entry.cls())
    update = type(recipe.update)(layer_decay=2.6)
    slots = {stage: getattr(recipe, stage) for stage in recipe.to_dict()}
    train(Recipe(**{**slots, "update": update}), model)
    assert torch.equal(first.weight, before)


def _resumed_equals_uninterrupted(recipe, stop, folder, seed=0):
    options = {"seed": seed, "log_every": 1}
    whole = train(recipe, **options)
    path = folder / "run.pt"
    with pytest.raises(Stopped):
        train(recipe, checkpoint=path, save_every=1, log=stop_at(stop), **options)
    torch.manual_seed(999)
    assert_same_bits(train(recipe, checkpoint=path, save_every=1, **options), whole)


@every_method
def test_resume_at_a_random_step(entry, tmp_path):
    stop = random.Random(entry.name).randint(1, 6)
    _resumed_equals_uninterrupted(recipe_of(entry.cls()), stop, tmp_path)


@pytest.mark.soak
@every_method
@pytest.mark.parametrize("stop", range(1, 8))
def test_resume_at_every_step(entry, stop, tmp_path):
    _resumed_equals_uninterrupted(recipe_of(entry.cls()), stop, tmp_path, seed=stop)


@every_method
def test_the_recipe_file_says_all_of_it(entry):
    recipe = recipe_of(entry.cls())
    assert Recipe.from_yaml(recipe.to_yaml()) == recipe
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    assert hash(entry.cls()) == hash(entry.cls())
    assert entry.name in recipe.describe()


@every_method
def test_the_preset_of_its_name(entry):
    if entry.name == "random-init":
        with pytest.raises(ValueError, match="presets recadam"):
            Recipe.preset(entry.name)
        recipe = Recipe.preset("random-init+recadam")
    else:
        recipe = Recipe.preset(entry.name)
        assert recipe.name in (entry.name, *PRESETS, "standard")
    assert entry.cls() in [method for _, method in recipe]


@every_method
def test_it_is_documented(entry):
    assert entry.cls.__module__.startswith("holdfast.")
    assert "Args:" in entry.cls.__doc__ or not dataclasses.fields(entry.cls)
    assert len(entry.summary) < 90
    assert entry.url == "" or entry.url.startswith("https://")


def test_no_two_methods_share_a_name():
    assert len({e.cls.__name__ for e in methods()}) == len(methods())


def test_the_data_is_left_alone():
    data = {setting: setting.make_data() for setting in (Vectors, Images, Texts)}
    for entry in ENTRIES:
        train(recipe_of(entry.cls()), data=data[setting_of(entry)], max_updates=4)
    assert data[Texts] == Texts.make_data()
    for setting in (Vectors, Images):
        assert all(map(torch.equal, data[setting].tensors, setting.make_data().tensors))
