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
#: English words, which other code uses with their usual meaning.
WORDS = {"auto", "features", "full", "keep", "lines", "pretrained", "ties", "uniform"}
PRESETS = {entry.name for entry in ENTRIES} - WORDS
#: The names of the methods' files.
MODULES = {name.replace("-", "_") for name in PRESETS}

#: Files that consist of lists of methods, and the method that chooses another one.
LISTS = {"__init__.py", "optim.py", "registry.py", "methods/auto.py"}

#: Statements that list methods: (file, where, name that is assigned).
LISTING = {
    ("recipe.py", "Recipe", "trainable"),
    ("recipe.py", "Recipe", "start"),
    ("recipe.py", "Recipe", "objective"),
    ("recipe.py", "Recipe", "recall"),
    ("recipe.py", "Recipe", "update"),
    ("recipe.py", "Recipe", "merging"),
    ("comparison/plan.py", None, "RECIPES"),
    ("comparison/plan.py", None, "TUNED_RECIPE"),
    ("comparison/plan.py", None, "COMBINATIONS"),
}
#: Modules that a file may import to fill its list.
IMPORTED = {
    ("recipe.py", "holdfast.methods.adamw"),
    ("recipe.py", "holdfast.methods.identity"),
}

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


def recommended_in(node):
    """The presets that a message recommends."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return set(re.findall(r"(?:preset|--recipe) ([\w-]+)", node.value)) & PRESETS
    return set()


def identifiers_in(node):
    """Arguments, variables and attributes that are named like a method's file."""
    if isinstance(node, ast.Name):
        return {node.id} & MODULES
    if isinstance(node, ast.Attribute):
        return {node.attr} & MODULES
    if isinstance(node, ast.arg | ast.keyword):
        return {node.arg} & MODULES
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name} & MODULES
    return set()


def imported_by(node):
    """The methods' modules that a node imports."""
    if isinstance(node, ast.ImportFrom) and node.module == "holdfast.methods":
        return {f"{node.module}.{alias.name}" for alias in node.names}
    if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("holdfast.methods."):
        return {node.module}
    if isinstance(node, ast.Import):
        return {a.name for a in node.names if a.name.startswith("holdfast.methods")}
    return set()


def lists_methods(node, where, file):
    """Whether a statement is one of the lists."""
    target = node.target if isinstance(node, ast.AnnAssign) else None
    if isinstance(node, ast.Assign):
        target = node.targets[0]
    return isinstance(target, ast.Name) and (file, where, target.id) in LISTING


def imports_for_a_list(node, file):
    found = {(file, module) for module in imported_by(node)}
    return bool(found) and found <= IMPORTED


def nodes(tree, file):
    """All nodes, except docstrings, lists of methods and the imports for these lists."""
    skipped = {id(node) for node in docstrings(tree)}
    bodies = [(None, tree.body)]
    bodies += [(node.name, node.body) for node in tree.body if isinstance(node, ast.ClassDef)]
    for where, body in bodies:
        for node in body:
            if lists_methods(node, where, file) or imports_for_a_list(node, file):
                skipped |= {id(inner) for inner in ast.walk(node)}
    return [node for node in ast.walk(tree) if id(node) not in skipped]


def named_in(source, file):
    for node in nodes(ast.parse(source), file):
        for name in classes_in(node):
            if own_file(CLASSES[name]) != file:
                yield f"{file}:{node.lineno} names {name}"
        for name in presets_in(node):
            if own_file(registry.find(name)) != file and (file, name) not in ALLOWED:
                yield f"{file}:{node.lineno} names {name!r}"
        for name in recommended_in(node):
            if own_file(registry.find(name)) != file:
                yield f"{file}:{node.lineno} recommends {name}"
        if not file.startswith("methods/"):
            for name in identifiers_in(node) | imported_by(node):
                yield f"{file}:{node.lineno} uses {name}"


def test_no_module_names_a_method():
    found = []
    for path in sorted(SRC.rglob("*.py")):
        file = path.relative_to(SRC).as_posix()
        if file not in LISTS:
            found += named_in(path.read_text(encoding="utf-8"), file)
    assert not found, "\n".join(found)


def test_the_lists_exist():
    for file, where, name in LISTING:
        tree = ast.parse((SRC / file).read_text(encoding="utf-8"))
        body = tree.body
        if where is not None:
            [body] = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == where]
        assert any(lists_methods(node, where, file) for node in body), name


@pytest.mark.parametrize(
    "source",
    [
        "from holdfast.methods.flow import Flow",
        "import holdfast\nholdfast.Flow()",
        "isinstance(recipe.objective, Flow)",
        "name == 'flow'",
        "recipe = 'recadam+flow'",
        "raise ValueError('use Flow() instead')",
        "from holdfast.methods.flow import FlowCriterion",
        "from holdfast.methods import flow",
        "import holdfast.methods.flow",
        "def train(rehearsal): ...",
        "train(rehearsal=data)",
        "run.rehearsal",
    ],
)
def test_special_cases_are_found(source):
    assert list(named_in(source, "hosts/raw.py"))


def test_words_in_sentences_are_allowed():
    source = '"""Flow"""\nraise ValueError("the flow of data")\nfull = keep = 1'
    assert not list(named_in(source, "hosts/raw.py"))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("recipe.py", "def check(): return 'lp-ft'"),
        ("recipe.py", "raise ValueError('add the preset lp-ft')"),
        ("recipe.py", "from holdfast.methods.lp_ft import LPFT"),
        ("recipe.py", "class Recipe:\n    other = LPFT()"),
        ("comparison/plan.py", "OTHERS = ('recadam',)"),
    ],
)
def test_files_with_a_list_are_checked_outside_of_it(file, source):
    assert list(named_in(source, file))
