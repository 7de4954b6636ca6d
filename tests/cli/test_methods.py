import json
import subprocess
import sys

import pytest

from holdfast import Recipe, registry
from holdfast.cli import main
from holdfast.cli._options import SHARED


def test_json(capsys):
    assert main(["methods", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == [e.name for e in registry.methods()]
    assert all(set(row) == {"name", "stage", "paper", "summary"} for row in rows)


def test_table(capsys):
    main(["methods"])
    out = capsys.readouterr().out
    assert all(entry.name in out and entry.summary in out for entry in registry.methods())
    assert "asft                dft + distill(strength=0.05, temperature=1.0)" in out


def test_one_method_with_its_settings(capsys):
    assert main(["methods", "WiSE_FT"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("merging\n  wise-ft             keep a point between")
    assert "https://arxiv.org/abs/2109.01903" in out
    assert "    merging.alpha               0.5\n" in out
    assert "recadam" not in out
    assert main(["methods", "recadam", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["settings"]["t0"] == 0.3
    assert row["settings"]["pull"] is None


def test_a_preset_shows_the_settings_of_its_methods(capsys):
    assert main(["methods", "asft"]) == 0
    out = capsys.readouterr().out
    assert "dft + distill(strength=0.05, temperature=1.0)" in out
    assert "    recall.strength             0.05\n" in out
    assert main(["methods", "recadm"]) == 2
    assert "unknown method 'recadm'; did you mean 'recadam'?\n" in capsys.readouterr().err


def test_names_joined_by_plus(capsys):
    assert main(["methods", "asft+wise-ft"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("preset\n  asft                dft + distill(")
    assert "    recall.strength             0.05\n" in out
    assert "    merging.alpha               0.5\n" in out
    assert main(["methods", "recadm+flow"]) == 2
    said = capsys.readouterr().err
    assert "unknown method 'recadm'; did you mean 'recadam'? (in the preset 'recadm+flow')" in said


def test_standard_shows_the_settings_of_adamw(capsys):
    assert main(["methods", "standard"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("preset\n  standard            plain fine-tuning\nupdate\n  adamw ")
    assert "    update.weight_decay         none\n" in out
    assert main(["methods", "standard", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["settings"]["betas"] == [0.9, 0.999]


NO_RECIPES = {"random-init", "model-stock"}  # alone


@pytest.mark.parametrize("method", sorted({e.name for e in registry.methods()} - NO_RECIPES))
def test_set_takes_every_setting_that_is_not_one_of_a_recipe_file(method, capsys):
    assert main(["methods", method]) == 0
    recipe, lines = Recipe.preset(method), capsys.readouterr().out.splitlines()[2:]
    shown = dict(line.split(maxsplit=1) for line in lines)
    assert [*shown] == [name for name in recipe.settings if name in shown]
    for name, value in shown.items():
        if not value.endswith("  (in a recipe file)"):
            assert recipe.with_settings({name: SHARED["set"]["type"](value)}) == recipe


def test_a_setting_that_set_does_not_take_is_one_of_a_recipe_file(capsys):
    assert main(["methods", "recadam"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line.endswith("  (in a recipe file)")] == [
        "update.betas", "update.anneal",
    ]  # fmt: skip


def test_help_and_module():
    run = [sys.executable, "-m", "holdfast"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "methods" in done.stdout
    done = subprocess.run([*run, "methods"], capture_output=True, text=True, check=True)
    assert "recadam" in done.stdout


def test_unknown_subcommand(capsys):
    assert main(["metods"]) == 2
    assert "did you mean 'methods'" in capsys.readouterr().err
