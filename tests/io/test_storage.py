"""Where results are stored: a folder, its address, or an address of fsspec."""

import pickle

import pytest

from comparison.small_plan import make_plan, what_must_agree

pytest.importorskip("transformers", reason="the hf extra is not installed")

from holdfast.comparison.scheduler import compare
from holdfast.comparison.worker import Worker
from holdfast.io.storage import Place


@pytest.fixture(params=["folder", "file://", "memory://", "dir::file://"])
def place(request, tmp_path):
    if request.param == "folder":
        return Place.at(tmp_path / "out")
    return Place.at(f"{request.param}{tmp_path}/out/")


def test_a_text_comes_back(place):
    file = place / "runs" / "recadam+flow-0" / "result.json"
    with pytest.raises(FileNotFoundError):
        file.read_text()
    file.remove()
    for text in ("θ ≠ θ*\n", "shorter"):
        file.write_text(text)
        assert file.read_text() == text
    assert pickle.loads(pickle.dumps(file)).read_text() == "shorter"
    file.remove()
    with pytest.raises(FileNotFoundError):
        file.read_text()


def test_names_are_those_that_were_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOLDFAST_CACHE", "cache")
    here, there = Place.at("runs/one"), Place.at("memory://bucket/one/")
    assert (here / "a").name == "runs/one/a"
    assert here.folder == tmp_path / "runs" / "one"
    assert Place.at(f"file://{tmp_path}/x").folder == tmp_path / "x"
    assert (there / "a").name == "memory://bucket/one/a"
    assert there.folder == Place.at("memory://bucket/one").folder
    assert there.folder.parts[:2] == ("cache", "compare")
    assert there.folder != Place.at("memory://bucket/two").folder


def test_what_fails_elsewhere_names_the_place(tmp_path):
    with pytest.raises(ValueError, match="Protocol not known: nowhere"):
        Place.at("nowhere://bucket/one")
    (tmp_path / "file").write_text("")
    place = Place.at(f"dir::file://{tmp_path}")
    (place / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write dir::file://.*/file/below"):
        (place / "file" / "below").write_text("")


def test_a_plan_elsewhere_gives_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    plan = make_plan(tmp_path, recipes=("recadam+wise-ft",), seeds=(0,), updates=2)
    (spec,) = plan.runs
    address = f"dir::file://{tmp_path}/there"
    places = [Place.at(tmp_path / "here"), Place.at(address)]
    workers = [Worker(plan, place.folder / "runs") for place in places]
    here, there = (
        worker(spec, None, place / "runs") for worker, place in zip(workers, places, strict=True)
    )
    written = {path.name for path in (tmp_path / "there").rglob("*.*")}
    assert written == {"result.json"}
    assert [path.name for path in Place.at(address).folder.rglob("*")] == ["runs"]
    # Both are read, and nothing is run again.
    told = []
    both = [
        compare(plan, place, on_finished=lambda *ended: told.append(ended), config="model: small\n")
        for place in (tmp_path / "here", address)
    ]
    assert [results.runs for results in both] == [(here,), (there,)]
    ours, theirs = (what_must_agree(results.to_json()) for results in both)
    assert ours == theirs
    assert told == []
    written = {path.name for path in (tmp_path / "there").rglob("*.*")}
    assert written == {".holdfast", "results.json", "result.json", "config.yaml"}
