"""A misspelled setting is an error that names the nearest one, in all public constructors."""

import inspect

import pytest

import holdfast
from holdfast._torch.checks import did_you_mean, named_settings

#: What holdfast makes itself, and functions of tensors without settings.
NO_SETTINGS = {
    "Distance", "ForgettingReport", "PretrainedHead", "Preview", "Reference", "Results", "Scores",
    "Tuned", "adapters_off", "count_targets", "global_targets", "pad_collate", "per_sample_loss",
    "weighted_loss",
}  # fmt: skip
PUBLIC = {n for n in holdfast._LAZY if callable(getattr(holdfast, n))} - NO_SETTINGS


def settings_of(name):
    parameters = inspect.signature(getattr(holdfast, name)).parameters.values()
    named = (p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD))
    return [setting for setting in named if len(setting) > 3]


@pytest.mark.parametrize("name", sorted(filter(settings_of, [*PUBLIC, "AccelerateLoop"])))
def test_the_nearest_setting_is_named(name):
    given, setting = {}, settings_of(name)[-1]
    if name in ("Watch", "measure_many"):  # pass on the names of tests
        given, setting = dict.fromkeys({"model", "base", "tuned"} & {*settings_of(name)}), "text"
    wrong = f"{setting}s"
    with pytest.raises(TypeError, match=f"has no setting '{wrong}'.*'{setting}'"):
        getattr(holdfast, name)(**given, **{wrong: 1})


def test_a_name_of_another_library_and_only_the_nearest_names():
    with pytest.raises(TypeError, match="no setting 'learning_rate'; did you mean 'lr'"):
        holdfast.finetune_loop(None, "standard", [], learning_rate=1e-3)
    assert did_you_mean("holdfst", ["holdfast", "oft", "hft"]) == "; did you mean 'holdfast'?"
    assert did_you_mean("text3", ["text1", "text2"]) == "; did you mean 'text2' or 'text1'?"


def test_a_decorated_function_keeps_its_signature():
    @named_settings
    def train(model, *, epochs=1):
        """Train."""
        return model, epochs

    assert str(inspect.signature(train)) == "(model, *, epochs=1)"
    assert (train.__name__, train.__doc__) == ("train", "Train.")
    assert train(3, epochs=2) == (3, 2)
    with pytest.raises(TypeError, match=r"^train has no setting 'epoch'; did you mean 'epochs'\?$"):
        train(3, epoch=2)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        train()
