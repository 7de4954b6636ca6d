"""The documentation builds without a warning, and its examples run and print what it shows."""

import ast
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.registry import methods

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]
#: Pages that train for longer than a test of `make test` may take.
LONG = ("walkthrough", "compare", "measure")
#: Packages of the extras: without one of them, a page that needs it is skipped.
EXTRAS = (
    "accelerate", "bitsandbytes", "datasets", "lightning", "peft", "plotly", "rich", "tensorboard",
    "tokenizers", "transformers", "trl", "yaml",
)  # fmt: skip
#: The defaults of their stages and torch's own optimizers have no page.
PLAIN = ("adamw", "full", "keep", "no-recall", "pretrained", "sgd", "uniform")

sys.path.append(str(ROOT / "docs"))
import _outputs  # noqa: E402


def missing_extra(error):
    """The package that is not installed, if that caused an error."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return error.name
        error = error.__cause__
    return None


def test_blocks_run_in_order_and_print(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "a\n```python\nx = 1\n```\n- b\n\n  ```python\n  y = x + 1\n  ```\n```bash\nz\n```\n"
        "```{.python .no-run}\nz = nowhere\n```\n```text\nof no block\n```\n"
        "```python\nprint(y)\n```\n\n```text\n2\n```\n"
        "```python\nprint(3)\n```\nIt is:\n```text\nno output\n```\n"
    )
    found = [(line, block["shown"], printed) for block, line, printed in _outputs.outputs(page)]
    assert found == [(3, None, ""), (8, None, ""), (20, "2\n", "2"), (27, None, "3")]


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
def test_words_must_be_equal_and_figures_close(shown, printed, same):
    assert _outputs.alike(shown, printed) == same


@pytest.mark.filterwarnings("ignore")  # the frameworks' own, which differ by release
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.soak] * (p.stem in LONG), id=p.stem) for p in PAGES],
)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    try:
        for block, line, printed in _outputs.outputs(page):
            if block["shown"] is not None:
                where = f"{page.name}, line {line}"
                assert _outputs.alike(block["shown"], printed), f"{where} prints\n{printed}"
    except Exception as error:
        if package := missing_extra(error):
            pytest.skip(f"{page.name} needs {package}, which is not installed")
        raise


@pytest.mark.parametrize(
    "entry", [e for e in methods() if e.name not in PLAIN], ids=lambda e: e.name
)
def test_the_page_of_a_method_has_its_options_with_their_defaults(entry):
    text = (ROOT / "docs" / "methods" / f"{entry.name}.md").read_text(encoding="utf-8")
    title = f"**`{entry.cls.__name__}`**"
    assert title in text
    for heading in ("What it does", "When to use it", "Options", "Cost", "Paper", "Example"):
        assert f"\n## {heading}\n" in text
    table = re.split(r"\n(?:\*\*|## )", text[text.index(title) + 2 :])[0]
    told = {}
    for names, defaults in re.findall(r"^\| (`.*?) \| (.*?) \|", table, re.MULTILINE):
        names, defaults = (re.findall(r"`([^`]+)`", cell) for cell in (names, defaults))
        told |= zip(names, map(ast.literal_eval, defaults), strict=True)
    assert told == {f.name: f.default for f in dataclasses.fields(entry.cls) if f.init}


@pytest.mark.soak
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
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
    # docs/_docstrings.py translates the Sphinx roles of the docstrings.
    reference = (tmp_path / "site" / "api" / "optim.html").read_text(encoding="utf-8")
    assert ":class:" not in reference
    assert "weight_decay" in reference
