import ast
import subprocess
import sys
from pathlib import Path

import pytest

import holdfast
from holdfast.stages import Method

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
    tree = ast.parse(Path(holdfast.__file__).read_text(encoding="utf-8"))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    names = ast.literal_eval(typed.body[-1].value)  # __all__ as type checkers see it
    assert {*names} == {*holdfast._LAZY} > {*holdfast.__all__}
    for name in {*holdfast._LAZY, *holdfast._HOSTS}:
        assert getattr(holdfast, name).__doc__, name


def test_dir_shows_public_names_only():
    assert [name for name in dir(holdfast) if not name.startswith("__")] == sorted(holdfast._LAZY)
    assert "__version__" in dir(holdfast)


def test_help_without_any_extra():
    code = f"import sys; sys.modules |= dict.fromkeys({EXTRAS}); import holdfast; help(holdfast)"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert "finetune_loop(" in done.stdout, done.stderr
    assert "    class " not in done.stdout
    assert len(done.stdout) < 20_000


def test_help_begins_with_a_screen_of_names():
    text = holdfast.__doc__
    assert len(text.splitlines()) <= 30
    alone = {name for name in holdfast._LAZY if not is_method(getattr(holdfast, name))}
    named = alone - {"Finch", "MoFO", "RecAdam", "SPD"}  # the optimizers of methods
    assert [name for name in named | {*holdfast._HOSTS} if name not in text] == []


def is_method(found):
    """Whether a public name is that of a method, which `holdfast methods` lists."""
    return isinstance(found, type) and issubclass(found, Method)


def test_a_star_imports_what_people_begin_with():
    names = {}
    exec("from holdfast import *", names)
    assert {"compare", "finetune_loop", "measure", "tune"} == {*names} - {"__builtins__"}


def test_no_module_has_the_name_of_a_lazy_export():
    modules = {path.stem for path in Path(holdfast.__file__).parent.iterdir()}
    taken = {
        name for name in modules & set(holdfast._LAZY) if holdfast._LAZY[name] != f"holdfast.{name}"
    }
    assert not taken  # importing the module would replace the name
    with pytest.raises(AttributeError, match="has no attribute 'compares'"):
        _ = holdfast.compares
