import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

CODE = """
import sys, holdfast
heavy = ["transformers", "accelerate", "peft", "trl", "datasets", "lightning", "optuna", "plotly",
         "rich", "sklearn", "triton", "filelock", "holdfast.comparison.scheduler"]
print([name for name in heavy if name in sys.modules])
from holdfast import Plan, Results, Tuning, compare, tune
import holdfast.comparison.scheduler, holdfast.comparison.tuning
print(callable(holdfast.compare) and callable(holdfast.tune))
"""


def test_the_core_imports_no_host_and_no_command_line():
    """Importing holdfast needs torch, safetensors and numpy only."""
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]


def test_public_names_exist_and_are_documented():
    for name in {*holdfast.__all__, *holdfast._LAZY}:
        assert getattr(holdfast, name).__doc__, name
        assert name in dir(holdfast)


def test_no_module_has_the_name_of_a_lazy_export():
    modules = {path.stem for path in Path(holdfast.__file__).parent.iterdir()}
    assert not modules & set(holdfast._LAZY)  # importing the module would replace the name
    with pytest.raises(AttributeError, match="has no attribute 'compares'"):
        _ = holdfast.compares
