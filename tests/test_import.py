import subprocess
import sys
from pathlib import Path

import pytest

import holdfast

#: The packages of all extras.
EXTRAS = (
    "accelerate", "bitsandbytes", "cattrs", "datasets", "deepspeed", "gguf", "jinja2", "lightning",
    "lm_eval", "matplotlib", "optuna", "peft", "PIL", "plotly", "ray", "rich", "scipy", "shtab",
    "sklearn", "transformers", "triton", "trl", "yaml",
)  # fmt: skip
CODE = """
import sys, holdfast
heavy = ["transformers", "accelerate", "peft", "trl", "datasets", "lightning", "optuna", "plotly",
         "rich", "sklearn", "triton", "filelock", "torch", "holdfast.comparison.scheduler"]
print([name for name in heavy if name in sys.modules])
from holdfast import Plan, Results, Tuning, compare, tune
import holdfast.comparison.scheduler, holdfast.comparison.tuning
print(callable(holdfast.compare) and callable(holdfast.tune))
"""


def test_the_core_imports_no_host_and_no_command_line():
    """Importing holdfast takes no time; its names are imported on first use."""
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "True"]


NEW_MODULES = """
import sys, torch
before = {*sys.modules}
from holdfast import Recipe, finetune_loop
new = {name for name in {*sys.modules} - before if not name.startswith("holdfast")}
print(sorted(name for name in new if name.partition(".")[0] not in sys.stdlib_module_names))
"""


def test_the_main_names_import_nothing_heavy():
    """Beside torch, they need only safetensors.

    Parts of torch that it does not import by itself, such as distributed tensors and the compiler,
    take longer to import than all of holdfast.
    """
    command = [sys.executable, "-c", NEW_MODULES]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['safetensors', 'safetensors._safetensors_rust', 'safetensors.torch']\n"


def test_public_names_exist_and_are_documented():
    assert {*holdfast.__all__} == {*holdfast._LAZY}
    for name in {*holdfast._LAZY, *holdfast._HOSTS}:
        assert getattr(holdfast, name).__doc__, name


def test_dir_shows_public_names_only():
    assert [name for name in dir(holdfast) if not name.startswith("__")] == sorted(holdfast.__all__)
    assert "__version__" in dir(holdfast)


def test_help_without_any_extra():
    code = f"import sys; sys.modules |= dict.fromkeys({EXTRAS}); import holdfast; help(holdfast)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "class Recipe" in done.stdout, done.stderr
    assert "HoldfastSFTTrainer" not in done.stdout


def test_no_module_has_the_name_of_a_lazy_export():
    modules = {path.stem for path in Path(holdfast.__file__).parent.iterdir()}
    taken = {
        name for name in modules & set(holdfast._LAZY) if holdfast._LAZY[name] != f"holdfast.{name}"
    }
    assert not taken  # importing the module would replace the name
    with pytest.raises(AttributeError, match="has no attribute 'compares'"):
        _ = holdfast.compares
