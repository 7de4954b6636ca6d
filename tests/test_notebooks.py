"""The notebooks of examples/ run from top to bottom, offline, and are saved with their outputs."""

import re
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
nbformat = pytest.importorskip("nbformat", reason="the dev extra is not installed")
nbclient = pytest.importorskip("nbclient", reason="the dev extra is not installed")
pytest.importorskip("ipykernel", reason="the dev extra is not installed")

from matrices import sampled  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))
#: The same cells with less work.
SMALL = {
    r"max_updates=\d+": "max_updates=2",
    r"islice\(batches, \d+\)": "islice(batches, 2)",
    r"limit(=|\": )\d+": r"limit\g<1>4",
}


def outputs(notebook):
    return [out for cell in notebook.cells for out in cell.get("outputs", ())]


def run(path, folder, changes):
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        for pattern, small in changes.items():
            cell.source = re.sub(pattern, small, cell.source)
    place = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()
    return notebook


# It takes longer than 5 seconds: a new process imports torch and transformers.
@pytest.mark.parametrize(
    "path", sampled(NOTEBOOKS, NOTEBOOKS[:1]), ids=[path.stem for path in NOTEBOOKS]
)
@pytest.mark.parametrize(
    "changes", [SMALL, pytest.param({}, marks=pytest.mark.soak)], ids=["small", "whole"]
)
def test_a_notebook_runs(path, changes, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    found = run(path, tmp_path, changes)
    shown = [{*out.get("data", {})} for out in outputs(found) if out.output_type != "stream"]
    assert sum("text/html" in kinds for kinds in shown) >= 3
    said = "".join(out.text for out in outputs(found) if out.output_type == "stream")
    assert "Warning" not in said


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_saved_with_small_outputs(path):
    assert path.stat().st_size < 100_000
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == [*range(1, len(code) + 1)]
    assert not re.search(r"/(root|home|tmp|work)/|Traceback", path.read_text(encoding="utf-8"))
