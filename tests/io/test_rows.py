"""Rows from files, saved datasets, folders of images and the hub."""

import json

import pytest

from holdfast.io.render import read_texts
from holdfast.io.rows import DatasetRows, hold_out, labels_of, open_rows

ROWS = [{"text": f"row {i}", "label": i % 2} for i in range(6)]


def image_folder(folder, classes=("cat", "dog"), size=(5, 4), n=2):
    image = pytest.importorskip("PIL.Image", reason="pillow is not installed")
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            image.new("RGB", size, (40 * number, 10 * i, 200)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def datasets():
    found = pytest.importorskip("datasets", reason="the hf extra is not installed")
    found.disable_progress_bars()
    return found


def test_files(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "a.txt").write_text("some text")
    (tmp_path / "a.csv").write_text("text,label\nrow,1\n")
    assert list(open_rows(tmp_path / "a.jsonl")) == ROWS
    assert list(open_rows(tmp_path / "a.txt")) == [{"text": "some text"}]
    assert list(open_rows(str(tmp_path / "a.csv"))) == [{"text": "row", "label": "1"}]


def test_an_unsupported_file_names_those_of_text_too(tmp_path):
    (tmp_path / "a.xlsx").write_text("x")
    with pytest.raises(ValueError, match=r"file type \.xlsx; .* \.jsonl, .* \.txt, \.md, \.text$"):
        open_rows(tmp_path / "a.xlsx")


def test_json_lines_are_read_as_far_as_they_are_used(tmp_path):
    lines = [*map(json.dumps, ROWS), "no row"]
    (tmp_path / "a.jsonl").write_text("\n\n".join(lines))
    for most in (1, 3, 6):
        assert open_rows(tmp_path / "a.jsonl", most) == ROWS[:most]
    for most in (7, None):
        with pytest.raises(ValueError, match="line 13 is not JSON"):
            open_rows(tmp_path / "a.jsonl", most)


def test_parquet_and_arrow(tmp_path, datasets):
    import pyarrow.feather

    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    table = datasets.Dataset.from_list(ROWS, features=features)
    table.to_parquet(tmp_path / "a.parquet")
    table.save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / "data-00000-of-00001.arrow").rename(tmp_path / "a.arrow")  # a stream
    pyarrow.feather.write_feather(table.data.table, tmp_path / "a.feather")  # a file
    for name in ("a.parquet", "a.arrow", "a.feather"):
        found = open_rows(tmp_path / name)
        assert list(found) == [found[i] for i in range(6)] == ROWS
        assert found.names == ["neg", "pos"]
    for name in ("b.parquet", "b.arrow"):
        (tmp_path / name).write_text("no table")
        form = name[2:].capitalize()
        with pytest.raises(ValueError, match=rf"b\.\w+ is not {form}: ") as error:
            open_rows(tmp_path / name)
        assert "\n" not in str(error.value)


def test_several_files_and_patterns(tmp_path, datasets, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(3):
        (tmp_path / f"{i}.jsonl").write_text(json.dumps(ROWS[i]))
        datasets.Dataset.from_list([ROWS[i]]).to_parquet(f"{i}.parquet")
    assert open_rows(["2.jsonl", "0.jsonl"]) == [ROWS[2], ROWS[0]]
    assert open_rows("*.jsonl") == open_rows(["[01].jsonl", "2.jsonl"]) == ROWS[:3]
    assert list(open_rows("*.parquet")) == list(open_rows(["0.jsonl", "[12].parquet"])) == ROWS[:3]
    (tmp_path / "[x].jsonl").write_text('{"text": "not a pattern"}')
    assert open_rows("[x].jsonl") == [{"text": "not a pattern"}]
    with pytest.raises(FileNotFoundError, match=r"no file matches gone\*\.jsonl"):
        open_rows(["0.jsonl", "gone*.jsonl"])
    with pytest.raises(ValueError, match="at least one file"):
        open_rows([])
    datasets.Dataset.from_list([{"text": 1}]).to_parquet("3.parquet")
    with pytest.raises(ValueError, match=r"0.parquet, 1.parquet … and 2 more have columns of diff"):
        open_rows("*.parquet")


def test_a_directory_with_the_files_of_a_dataset(tmp_path, datasets, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "d" / "data").mkdir(parents=True)
    for split, rows in (("train", ROWS), ("test", ROWS[:2])):
        datasets.Dataset.from_list(rows).to_parquet(
            tmp_path / "d" / "data" / f"{split}-00000-of-00001.parquet"
        )
    assert list(open_rows(f"{tmp_path}/d:train")) == ROWS
    assert list(open_rows(f"{tmp_path}/d:test")) == ROWS[:2]
    with pytest.raises(ValueError, match="has several splits: choose one of train, test"):
        open_rows(tmp_path / "d")
    with pytest.raises(ValueError, match=r"d cannot be read as a dataset: Unknown split \"dev\""):
        open_rows(f"{tmp_path}/d:dev")


def test_texts_of_a_file_of_rows(tmp_path):
    (tmp_path / "a.txt").write_text('{"text": 1}\n')
    assert read_texts(tmp_path / "a.txt") == '{"text": 1}\n'
    (tmp_path / "b.jsonl").write_text('{"text": "one\\n"}\n{"text": "two", "label": 1}\n')
    assert read_texts(tmp_path / "b.jsonl") == "one\n\n\ntwo"
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n{"prompt": "two"}\n')
    with pytest.raises(ValueError, match=r"c.jsonl: row 1 needs one of the columns text"):
        read_texts(tmp_path / "c.jsonl")
    (tmp_path / "d.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    with pytest.raises(ValueError, match=r"d.jsonl: text of row 1 must be text, got null"):
        read_texts(tmp_path / "d.jsonl")
    (tmp_path / "e.jsonl").write_text('{"prompt": "two"}\n')
    with pytest.raises(ValueError, match="have the column text in each row"):
        read_texts(tmp_path / "e.jsonl")
    assert read_texts(tmp_path / "e.jsonl", {"text": "prompt"}) == "two"
    assert read_texts(tmp_path / "b.jsonl", {"text": "prompt"}) == "one\n\n\ntwo"


def test_a_saved_dataset_and_its_splits(tmp_path, datasets):
    one = datasets.Dataset.from_list(ROWS)
    one.save_to_disk(tmp_path / "one")
    datasets.DatasetDict({"train": one, "dev": one.select([1])}).save_to_disk(tmp_path / "both")
    assert list(open_rows(tmp_path / "one")) == ROWS
    assert list(open_rows(f"{tmp_path}/both:train")) == ROWS
    assert list(open_rows(f"{tmp_path}/both:dev")) == ROWS[1:2]
    with pytest.raises(ValueError, match=r"several splits: choose one of train, dev"):
        open_rows(tmp_path / "both")
    with pytest.raises(ValueError, match=r"no split 'test'.*train, dev"):
        open_rows(f"{tmp_path}/both:test")
    with pytest.raises(ValueError, match="has no splits: remove :train"):
        open_rows(f"{tmp_path}/one:train")


def test_slices_and_names_of_classes(datasets):
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["neg", "pos"])}
    )
    table = DatasetRows(datasets.Dataset.from_list(ROWS, features=features))
    assert table.names == ["neg", "pos"]
    assert [row["label"] for row in table[1:4]] == labels_of(table, "t")[1:4] == [1, 0, 1]
    # Names that are numbers would be taken for numbers: they stand in the rows.
    features["label"] = datasets.ClassLabel(names=["10", "1"])
    table = DatasetRows(datasets.Dataset.from_list(ROWS, features=features))
    assert (table.names, table[0]["label"], table.labels()[:2]) == (None, "10", ["10", "1"])


@pytest.mark.parametrize("names", [["-1", "0", "1"], ["1", "2", "other"], ["1.0", "2.0", "0.5"]])
def test_names_of_which_some_are_numbers_stand_in_the_rows(names, datasets):
    features = datasets.Features({"label": datasets.ClassLabel(names=names)})
    table = DatasetRows(
        datasets.Dataset.from_list([{"label": i} for i in range(3)], features=features)
    )
    assert (table.names, table.classes) == (None, True)
    assert [row["label"] for row in table] == table.labels() == names
    one_lacks = datasets.Dataset.from_list([{"label": 0}, {"label": -1}], features=features)
    with pytest.raises(ValueError, match="1 rows have no label; the first is row 1"):
        labels_of(DatasetRows(one_lacks), "d")


def test_images_are_not_decoded_for_their_labels(tmp_path, datasets, monkeypatch):
    folder = image_folder(tmp_path / "pets")
    data = datasets.load_dataset(
        "imagefolder", data_dir=str(folder), split="train", cache_dir=str(tmp_path / "cache")
    )
    table = DatasetRows(data)

    def no(*_, **__):
        raise AssertionError("decoded")

    with monkeypatch.context() as patch:
        patch.setattr(datasets.Image, "decode_example", no)
        assert labels_of(table, "pets") == [0, 0, 1, 1]
        assert len(table[:3]) == 3
    assert table[3]["image"].size == (5, 4)


def test_a_folder_of_images(tmp_path):
    folder = image_folder(tmp_path / "pets" / "train")
    rows = open_rows(folder)
    assert [row["label"] for row in rows] == ["cat", "cat", "dog", "dog"]
    assert rows == open_rows(f"{tmp_path}/pets:train")
    image_folder(folder, [".ipynb_checkpoints"])
    (folder / "cat" / "._0.png").write_text("of a Mac")
    assert rows == open_rows(folder)
    with pytest.raises(ValueError, match=r"do you mean .*pets/train?"):
        open_rows(tmp_path / "pets")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="neither a dataset saved by"):
        open_rows(tmp_path / "empty")


@pytest.mark.parametrize(
    "name",
    ["gone.jsonl", "gone.txt", "/no/such/place", "a/b/c", "./gone", "a:b:c:d", "gone.csv.gz"],
)
def test_what_cannot_be_of_the_hub(name):
    with pytest.raises(FileNotFoundError, match=f"no such file: {name}"):
        open_rows(name)


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        ("openai/gsm8k", ("openai/gsm8k", None, None)),
        ("openai/gsm8k:train", ("openai/gsm8k", None, "train")),
        ("openai/gsm8k:main:train", ("openai/gsm8k", "main", "train")),
    ],
)
def test_the_hub(name, asked, datasets, monkeypatch):
    seen = []

    def load(dataset, configuration, split):
        seen.append((dataset, configuration, split))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("holdfast.io.hub._is_reachable", lambda: True)
    assert list(open_rows(name)) == ROWS
    assert seen == [asked]


def test_a_hub_that_cannot_be_reached_is_not_waited_for(datasets, monkeypatch):
    monkeypatch.setattr("holdfast.io.hub._is_reachable", lambda: False)
    with pytest.raises(OSError, match="openai/gsm8k is not a local file or directory"):
        open_rows("openai/gsm8k:train")


def test_the_hub_offline(datasets, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="is neither a local file or directory nor a dataset") as e:
        open_rows("openai/no-such-dataset:main:train")
    assert "\n" not in str(e.value)


def test_rows_without_labels():
    assert labels_of([{"text": "a"}], "d") is None
    with pytest.raises(ValueError, match="d: 1 rows have no label; the first is row 1"):
        labels_of([{"text": "a", "label": 0}, {"text": "b", "label": None}], "d")


def test_damaged_files_are_named(tmp_path):
    import gzip

    whole = gzip.compress(json.dumps({"text": "some words"}).encode() * 50)
    bad = {"cut": whole[:-20], "changed": whole[:12] + b"\xff\xff\xff" + whole[15:], "no": b"text"}
    for name, content in bad.items():
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name}.jsonl.gz cannot be read as text: "):
            open_rows(tmp_path / f"{name}.jsonl.gz")
    (tmp_path / "deep.jsonl").write_text('{"text": "a"}\n{"text": ' + "[" * 100_000)
    with pytest.raises(ValueError, match=r"deep.jsonl, line 2 is not JSON: maximum recursion"):
        open_rows(tmp_path / "deep.jsonl")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"deep.json is not JSON: maximum recursion"):
        open_rows(tmp_path / "deep.json")


def test_half_of_a_surrogate_pair_is_refused(tmp_path):
    (tmp_path / "good.jsonl").write_text(r'{"text": "\ud83d\ude00"}')
    assert open_rows(tmp_path / "good.jsonl") == [{"text": "😀"}]
    for row in (r'{"text": "\ud83d"}', r'{"text": "a", "x": [{"y": "\udc00"}]}', r'{"\uD800": 1}'):
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n' + row)
        with pytest.raises(ValueError, match=r"bad.jsonl: row 1 holds '\\ud.*half of a surrogate"):
            open_rows(tmp_path / "bad.jsonl")


def test_rows_of_a_dataset_are_held_out_without_reading_them():
    datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
    rows = DatasetRows(datasets.Dataset.from_list([{"text": str(n), "label": n} for n in range(7)]))
    trained, held = hold_out(rows, 0.3)
    assert isinstance(trained, DatasetRows)
    assert isinstance(held, DatasetRows)
    assert [row["label"] for row in held] == [3, 6]
    assert [row["label"] for row in trained] == [0, 1, 2, 4, 5]
    for share in (0.1, 0.25, 0.3, 0.4, 0.45, 0.5):
        assert len(hold_out(range(1000), share)[1]) == pytest.approx(1000 * share, abs=1)
    with pytest.raises(ValueError, match=r"a share of 0.1 of 7 rows is not a row"):
        hold_out(rows, 0.1)
