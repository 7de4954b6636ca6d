import json
import subprocess
import sys

from holdfast import registry
from holdfast.cli import main


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


def test_help_and_module():
    run = [sys.executable, "-m", "holdfast"]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert "methods" in done.stdout
    done = subprocess.run([*run, "methods"], capture_output=True, text=True, check=True)
    assert "recadam" in done.stdout


def test_unknown_subcommand(capsys):
    assert main(["metods"]) == 2
    assert "did you mean 'methods'" in capsys.readouterr().err
