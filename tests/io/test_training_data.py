"""Training data by name, for every kind of model."""

import json

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")

from comparison.tiny import save_bert, save_images, save_llama, save_vit  # noqa: E402
from holdfast.io.encoding import TrainingData  # noqa: E402
from holdfast.io.models import Loader  # noqa: E402

CLASSES = [{"text": "the cat sat", "label": "cat"}, {"text": "a dog ran", "label": "dog"}] * 6


@pytest.fixture(autouse=True)
def _cache(monkeypatch, tmp_path):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))


def write(path, rows):
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def open_task(source, data, **more):
    return TrainingData.open(source, data, Loader(max_length=16), **more)


def test_images_are_decoded_when_they_are_asked_for(tmp_path, monkeypatch):
    data = save_images(tmp_path / "images")
    task = open_task(save_vit(tmp_path / "vit", num_labels=5), data)
    model, new = task.load()
    assert new == ("classifier",)
    samples = task.samples(model)
    (tmp_path / "images" / "red" / "0.png").write_text("not an image")
    assert (len(samples), samples[0]["labels"]) == (12, 0)  # blue, green, red
    assert samples[0]["pixel_values"].shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"red/0.png cannot be read as an image"):
        samples[8]
    (tmp_path / "images" / "red" / "0.png").unlink()
    with pytest.raises(FileNotFoundError, match=r"no such file: .*red/0.png"):
        samples[8]


def test_images_of_a_file_of_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    save_images(tmp_path / "images")
    files = sorted((tmp_path / "images").glob("*/*.png"))
    rows = [{"image": {"bytes": f.read_bytes(), "path": None}, "label": i % 2} for i, f in
            enumerate(files)]  # fmt: skip
    pyarrow.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    folder = open_task(save_vit(tmp_path / "vit"), str(tmp_path / "images"))
    table = open_task(save_vit(tmp_path / "vit"), str(tmp_path / "rows.parquet"))
    one, other = (task.samples(task.load()[0]) for task in (folder, table))
    assert torch.equal(one[5]["pixel_values"], other[5]["pixel_values"])
    assert [other[i]["labels"] for i in range(3)] == [0, 1, 0]


def test_a_decoder_with_a_new_head_pads_at_the_end(tmp_path):
    task = open_task(
        save_llama(tmp_path / "llama"), write(tmp_path / "d.jsonl", CLASSES), head="classification"
    )
    model, new = task.load()
    assert (new, model.config.pad_token_id) == (("score",), 0)
    assert task.samples(model)[1]["labels"] == 1


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"x": 1}], "has no head for"),
        ([*CLASSES, {"text": "the cat"}], "1 rows have no label; the first is row 12"),
        ([{"text": "a", "label": [0, 1]}] * 2, r"text or a finite number, got \[0, 1\]"),
        (
            [{"image": "a.png", "label": 0}, {"image": "b.png", "label": 1}],
            "no image classifier",
        ),
    ],
)
def test_rows_that_do_not_fit(rows, words, tmp_path):
    data = write(tmp_path / "d.jsonl", rows)
    source = save_bert(tmp_path / "bert")

    def samples():
        task = open_task(source, data)
        return task.samples(task.load()[0])

    with pytest.raises(ValueError, match=words):
        samples()
