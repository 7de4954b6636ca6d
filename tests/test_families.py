"""Every cell of the tables of docs/models.md: a family of models with a recipe."""

import copy
import functools
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("transformers", reason="the hf extra is not installed")
pytest.importorskip("peft", reason="the peft extra is not installed")

from comparison.tiny import save_images
from families import CAUSAL, IMAGES, MULTIMODAL, TEXT, save_family
from holdfast.hosts.job import Training, encode, train
from holdfast.io.encoding import TrainingData
from holdfast.io.models import Loader
from holdfast.recipe import Recipe
from matrices import sampled

PAGE = (Path(__file__).parents[1] / "docs" / "models.md").read_text(encoding="utf-8")
TABLE = re.compile(r"\| (texts with labels|language|images) \|(.*)\n\|[-| ]+\n((?:\|.*\n)+)")
REASONS = dict(re.findall(r"^- ([a-z]): `(.*)`$", PAGE, re.MULTILINE))
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "two", "dog", "ran"]
TRAINING = Training(lr=1e-3, max_updates=1, batch_size=2, max_length=32)


def cells():
    for data, head, rows in TABLE.findall(PAGE):
        recipes = [name.strip(" `") for name in head.strip(" |").split("|")]
        for row in rows.splitlines():
            family, *found = [cell.strip() for cell in row.strip(" |").split("|")]
            yield from ((data, family, *pair) for pair in zip(recipes, found, strict=True))


CELLS = [*cells()]
QUICK = [c for c in CELLS if c[1] in ("BERT", "RoBERTa", "DistilBERT", "Llama", "LLaVA", "ResNet")]


def test_the_tables_name_every_family():
    expected = {("texts with labels", name) for name in (*TEXT, *CAUSAL)}
    expected |= {("language", name) for name in (*CAUSAL, *MULTIMODAL, "T5")}
    expected |= {("images", name) for name in IMAGES}
    assert {cell[:2] for cell in CELLS} == expected
    assert {cell[3] for cell in CELLS} == {"yes", *REASONS}


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    """A function that opens the data and loads the model of a family, once."""
    root = tmp_path_factory.mktemp("families")

    @functools.cache
    def open_family(data, family):
        folder = root / family
        if not folder.exists():
            save_family(family, folder)
        if data == "images":
            name = root / "images"
            if not name.exists():
                save_images(name, n=2)
        else:
            name = root / f"{data}.jsonl"
            name.write_text("\n".join(rows(data)))
        labeled = data == "texts with labels"
        head = "classification" if labeled and family in CAUSAL else "auto"
        task = TrainingData.open(str(folder), str(name), Loader(max_length=32), head=head)
        return task, functools.cache(task.load)

    return open_family


def rows(data):
    for i in range(8):
        words = " ".join(WORDS[i % 3 : i + 3])
        if data == "language":
            yield f'{{"prompt": "{words}", "completion": "{WORDS[i]}"}}'
        else:
            yield f'{{"text": "{words}", "label": "{"no" if i % 2 else "yes"}"}}'


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # in DeBERTa
# The features of a random MobileNetV2 hardly differ between images.
@pytest.mark.filterwarnings("ignore:the probe has not converged:UserWarning")
@pytest.mark.parametrize(("data", "family", "recipe", "cell"), sampled(CELLS, QUICK))
def test_a_family_with_a_recipe(data, family, recipe, cell, opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    if family.endswith("timm") and not all(map(find_spec, ("timm", "torchvision"))):
        pytest.skip("needs timm and torchvision, which are in no extra")
    if cell == "yes":
        finetune(*opened(data, family), recipe, tmp_path)
        return
    sentence = re.escape(REASONS[cell]).replace("…", ".+")
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        finetune(*opened(data, family), recipe, tmp_path)


def finetune(task, load, name, folder):
    recipe = Recipe.preset(name)
    samples, _ = encode(task, [recipe], Training())
    model, new = load()
    tuned = train(
        copy.deepcopy(model), recipe, samples, TRAINING, folder, new=new, tokenizer=task.tokenizer
    )
    assert tuned.history[-1]["update"] == 1
