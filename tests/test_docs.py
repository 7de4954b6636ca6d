"""The documentation builds without a warning, and what its pages show runs."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
FENCE = re.compile(r"( *)(`{3,})([^`]*)")
REASON = re.compile(r"<!-- not run: .+ -->")
#: What is not a dependency of the core: a page that needs one of these is skipped without it.
EXTRAS = (
    "accelerate", "datasets", "lightning", "peft", "plotly", "rich", "tokenizers", "transformers",
    "trl", "yaml",
)  # fmt: skip


def blocks(text):
    """The Python blocks of a page that run, as (line, code), in order."""
    found, opening, code, above = [], None, [], ""
    for number, line in enumerate(text.split("\n"), 1):
        fence = FENCE.fullmatch(line)
        if opening is None and fence:
            opening, code, begin = fence, [], number + 1
        elif opening is not None and line.strip() == opening[2]:
            words = re.findall(r"[\w-]+", opening[3])
            if words[:1] == ["python"] and "no-run" not in words:
                found.append((begin, textwrap.dedent("\n".join(code))))
            elif words[:1] == ["python"]:
                assert REASON.search(above), f"line {begin}: <!-- not run: why --> is missing"
            opening = None
        elif opening is not None:
            code.append(line)
        elif line.strip():
            above = line
    return found


def missing_extra(error):
    """The package that is not installed, if that is why something failed."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name in EXTRAS:
            return error.name
        error = error.__cause__
    return None


def test_blocks_are_found():
    page = "a\n```python\nx = 1\n```\n- b\n\n  ```python\n  y = x\n  ```\n```bash\nz\n```\n"
    page += "<!-- not run: it takes a GPU -->\n```{.python .no-run}\nz = 1\n```\n"
    assert blocks(page) == [(3, "x = 1"), (8, "y = x")]
    with pytest.raises(AssertionError, match="line 3: "):
        blocks("a\n```{.python .no-run}\nz = 1\n```\n")


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


@pytest.mark.filterwarnings("ignore")  # those of the frameworks, which differ by their release
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT / "docs").as_posix())
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    found = blocks(page.read_text(encoding="utf-8"))
    if not found:
        return
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    names = {"__name__": "__main__"}
    for line, code in found:
        where = f"{page.relative_to(ROOT)}, the block at line {line}"
        try:
            # The lines of a traceback are those of the page.
            exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)
        except Exception as error:
            if package := missing_extra(error):
                pytest.skip(f"{where} needs {package}, which is not installed")
            error.add_note(where) if hasattr(error, "add_note") else None
            raise
