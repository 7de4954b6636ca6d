"""The documentation builds without a warning, its links lead somewhere, and its examples run."""

import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest

from holdfast.registry import methods

ROOT = Path(__file__).parents[1]
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if "```python" in page.read_text()]
LINKING = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Pages that train for longer than a test of `make test` may take.
LONG = ("walkthrough", "compare", "measure", "tutorial")
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
def test_a_method_has_a_page_that_names_its_class(entry):
    text = (ROOT / "docs" / "methods" / f"{entry.name}.md").read_text(encoding="utf-8")
    assert re.search(rf"\b{entry.cls.__name__}\b", text)


def without_code(page):
    return re.sub(r"^ *```.*?^ *```|`[^`\n]*`", "", page.read_text("utf-8"), flags=re.S | re.M)


def anchors(page):
    """The anchors of a page's headings, as the site and as code hosts make them."""
    found = set()
    for title in re.findall(r"^#+ +(.*)$", page.read_text(encoding="utf-8"), re.M):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", title).lower().strip()
        plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip()))
        found.add(re.sub(r"[^\w\s-]", "", title).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    broken = []
    for link in re.findall(r"\]\(<?(?![a-z]+:)([^)\s>]+)", without_code(page)):
        path, _, anchor = link.partition("#")
        file = (page.parent / path).resolve() if path else page
        if path == "explorer/index.html":  # `make explorer` writes it
            continue
        if not file.exists() or (
            # Headings of the reference come from docstrings.
            anchor and file.suffix == ".md" and "api" not in file.parts
            and anchor not in anchors(file)
        ):  # fmt: skip
            broken.append(link)
    assert broken == []


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
    assert "holdfast: all results" in (tmp_path / "site/explorer/index.html").read_text("utf-8")
