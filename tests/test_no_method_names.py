"""No code outside a method's own file names the method: everything special is behind a hook."""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast import registry

SRC = Path(holdfast.__file__).parent
ENTRIES = registry.methods()
CLASSES = {
    name: entry
    for entry in ENTRIES
    for name, cls in vars(sys.modules[entry.cls.__module__]).items()
    if cls is entry.cls
    or (
        isinstance(cls, type)
        and cls.__module__ == entry.cls.__module__
        and issubclass(cls, torch.optim.Optimizer)
    )
}
PRESETS = {entry.name for entry in ENTRIES} - {
    # English words, which other code uses with their usual meaning.
    "full", "keep", "pretrained", "rehearsal", "uniform",
}  # fmt: skip

#: Files that list methods: the registry, the re-exports, Recipe's defaults, compare's default list.
LISTS = {"__init__.py", "optim.py", "registry.py", "recipe.py", "comparison/plan.py"}

#: A setting whose value is the name of a measure of importance.
ALLOWED = {("methods/recadam.py", "mas")}


def own_file(entry):
    return Path(entry.cls.__module__.removeprefix("holdfast.").replace(".", "/") + ".py").as_posix()


def docstrings(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                yield first.value


def classes_in(node):
    """The method classes that a node names: in code, or as code within a string."""
    if isinstance(node, ast.Name):
        return {node.id} & set(CLASSES)
    if isinstance(node, ast.Attribute):
        return {node.attr} & set(CLASSES)
    if isinstance(node, ast.alias):
        return {node.name.rpartition(".")[2]} & set(CLASSES)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return {node.value, *re.findall(r"\b(\w+)\(", node.value)} & set(CLASSES)
    return set()


def presets_in(node):
    """The presets in a string that is nothing but presets, such as "recadam+flow"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        parts = set(node.value.split("+"))
        return parts & PRESETS if parts <= {"standard", *(e.name for e in ENTRIES)} else set()
    return set()


def named_in(source, file):
    tree = ast.parse(source)
    skipped = {id(node) for node in docstrings(tree)}
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        for name in classes_in(node):
            if own_file(CLASSES[name]) != file:
                yield f"{file}:{node.lineno} names {name}"
        for name in presets_in(node):
            if own_file(registry.find(name)) != file and (file, name) not in ALLOWED:
                yield f"{file}:{node.lineno} names {name!r}"


def test_no_module_names_a_method():
    found = []
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC).as_posix()
        if file not in LISTS:
            found += named_in(path.read_text(encoding="utf-8"), file)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.methods.flow import Flow",
        "import holdfast\nholdfast.Flow()",
        "isinstance(recipe.objective, Flow)",
        "name == 'flow'",
        "recipe = 'recadam+flow'",
        "raise ValueError('use Flow() instead')",
    ],
)
def test_special_cases_are_found(source):
    assert list(named_in(source, "hosts/raw.py"))


def test_words_in_sentences_are_allowed():
    source = '"""Flow"""\nraise ValueError("the flow of data")\nfull = keep = 1'
    assert not list(named_in(source, "hosts/raw.py"))
