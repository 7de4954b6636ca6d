"""The documentation builds without a warning, and what its pages show runs and prints that."""

import ast
import dataclasses
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.registry import methods

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
#: What is not a dependency of the core: a page that needs one of these is skipped without it.
EXTRAS = (
    "accelerate", "datasets", "lightning", "peft", "plotly", "rich", "tokenizers", "transformers",
    "trl", "yaml",
)  # fmt: skip
#: The defaults of their stages, and torch's own optimizers: they have no page.
PLAIN = ("adamw", "full", "keep", "pretrained", "sgd", "uniform")

_spec = importlib.util.spec_from_file_location("_outputs", ROOT / "docs" / "_outputs.py")
outputs = importlib.util.module_from_spec(_spec)
sys.modules["_outputs"] = outputs  # dataclasses look their module up
_spec.loader.exec_module(outputs)


def missing_extra(error):
    """The package that is not installed, if that is why something failed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return error.name
        error = error.__cause__
    return None


def test_cells_are_found():
    page = "a\n```python\nx = 1\n```\n- b\n\n  ```python\n  y = x\n  ```\n```bash\nz\n```\n"
    page += "<!-- not run: it takes a GPU -->\n```{.python .no-run}\nz = 1\n```\n"
    page += "```text\nof no cell\n```\n```python\nprint(2)\n```\n\n```text\n2\n```\n"
    page += "```python\nw = 1\n```\nIt is:\n```text\nno output\n```\n"
    cells = outputs.cells_of(page)
    assert [(c.line, c.code, c.shown) for c in cells] == [
        (3, "x = 1", None),
        (8, "y = x", None),
        (21, "print(2)", "2"),
        (28, "w = 1", None),
    ]
    assert page.split("\n")[cells[2].lines] == ["2"]
    with pytest.raises(ValueError, match="line 3: "):
        outputs.cells_of("a\n```{.python .no-run}\nz = 1\n```\n")


@pytest.mark.parametrize(
    ("shown", "printed", "same"),
    [
        ("loss 2.31, lost +1500 %", "loss  2.33, lost +1592 %", True),
        ("loss 2.31", "loss 2.71", False),
        ("λ 0.00", "λ 0.01", True),  # the last digit
        ("λ 0.00", "λ 0.02", False),
        ("take flow", "take recadam", False),
        ("1,000 rows", "1,010 rows", True),
        ("+3", "-3", False),
        ("a\nb", "a b", True),
        ("a\nb", "a", False),
    ],
)
def test_words_must_be_the_same_and_figures_nearly_so(shown, printed, same):
    assert outputs.alike(shown, printed) == same


def test_what_is_not_installed_is_told_from_what_is_broken():
    wrapped = ImportError("this host needs TRL")
    wrapped.__cause__ = ModuleNotFoundError("No module named 'trl'", name="trl")
    assert missing_extra(wrapped) == "trl"
    assert missing_extra(ModuleNotFoundError("no", name="trl.nowhere")) is None
    assert missing_extra(ImportError("cannot import name", name="holdfast")) is None


def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    pytest.importorskip("material", reason="the docs extra is not installed")
    pytest.importorskip("mkdocstrings", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path / "site"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert "WARNING" not in done.stderr + done.stdout, done.stderr
    assert done.returncode == 0, done.stderr
    pages = [page.relative_to(ROOT / "docs").with_suffix(".html") for page in PAGES]
    assert all((tmp_path / "site" / page).is_file() for page in pages)
    # Docstrings are written with Sphinx's roles, which docs/_docstrings.py translates.
    reference = (tmp_path / "site" / "api" / "optim.html").read_text(encoding="utf-8")
    assert ":class:" not in reference
    assert "weight_decay" in reference


@pytest.mark.parametrize(
    "method",
    [entry.cls for entry in methods() if entry.name not in PLAIN],
    ids=lambda c: c.__name__,
)
def test_the_page_of_a_method_has_its_options_with_their_defaults(method):
    title = f"**`{method.__name__}`**"
    (page,) = [p for p in (ROOT / "docs" / "methods").glob("*.md") if title in p.read_text("utf-8")]
    text = page.read_text(encoding="utf-8")
    for heading in ("What it does", "When to use it", "Options", "Cost", "Paper", "Example"):
        assert f"\n## {heading}\n" in text
    table = re.split(r"\n(?:\*\*|## )", text[text.index(title) + 2 :])[0]
    told = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        names, defaults = (re.findall(r"`([^`]+)`", cell) for cell in (names, defaults))
        told |= zip(names, map(ast.literal_eval, defaults), strict=True)
    assert told == {f.name: f.default for f in dataclasses.fields(method) if f.init}


@pytest.mark.filterwarnings("ignore")  # those of the frameworks, which differ by their release
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT / "docs").as_posix())
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    found = outputs.cells_of(page.read_text(encoding="utf-8"))
    if not found:
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    names = {"__name__": "__main__"}
    for cell in found:
        where = f"{page.relative_to(ROOT)}, the block at line {cell.line}"
        try:
            printed = outputs.run(cell, page, names)
        except Exception as error:
            if package := missing_extra(error):
                pytest.skip(f"{where} needs {package}, which is not installed")
            error.add_note(where) if hasattr(error, "add_note") else None
            raise
        if cell.shown is not None:
            assert outputs.alike(cell.shown, printed), f"{where} prints\n{printed}"
