"""Every family of models with every kind of recipe: docs/data.md lists what is refused."""

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

PAGE = (Path(__file__).parents[1] / "docs" / "data.md").read_text(encoding="utf-8")
WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "two", "dog", "ran"]
TRAINING = Training(lr=1e-3, max_updates=1, batch_size=2, max_length=32)
RECIPES = ("standard", "linear-probe", "lp-ft", "recadam+flow", "holdfast", "lora", "self-replay")
FAMILIES = {
    "texts with labels": (*TEXT, *CAUSAL),
    "language": (*CAUSAL, *MULTIMODAL, "T5"),
    "images": (*IMAGES,),
}
TIED = ("GPT-2", "Gemma 3", "Mamba", "Gemma 3, images", "T5")
CONVOLUTIONS = ("ResNet", "MobileNetV2", "ResNet of timm")
CELLS = [(data, f, r) for data, families in FAMILIES.items() for f in families for r in RECIPES]
QUICK = [c for c in CELLS if c[1] in ("BERT", "RoBERTa", "DistilBERT", "Llama", "LLaVA", "ResNet")]


def refused(data, family, recipe):
    """Distinctive words of the error, or None."""
    if data == "texts with labels" and family == "Mamba":
        return "transformers has no text classifier for mamba"
    if recipe == "self-replay" and (data != "language" or family == "T5"):
        return "needs a causal language model"
    if data == "language" and recipe == "linear-probe" and family in TIED:
        return "the head lm_head shares weights with"
    if data == "language" and family == "T5":
        return "give rows with a text and a label"
    if data == "language" and recipe == "lp-ft":
        return "but the task is causal_lm"
    if recipe == "lora" and family in CONVOLUTIONS:
        return "has no linear layer besides its head"
    return None


def test_the_page_names_every_family():
    rows = dict(re.findall(r"^\| (texts with labels|language|images) \| (.*) \|$", PAGE, re.M))
    named = {"texts with labels": [*TEXT], "language": [*CAUSAL, *MULTIMODAL], "images": [*IMAGES]}
    for data, families in named.items():
        assert rows[data].removesuffix("; and the language models below").split("; ") == families


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
@pytest.mark.parametrize(("data", "family", "recipe"), sampled(CELLS, QUICK))
def test_a_family_with_a_recipe(data, family, recipe, opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    if family.endswith("timm") and not all(map(find_spec, ("timm", "torchvision"))):
        pytest.skip("needs timm and torchvision, which are in no extra")
    words = refused(data, family, recipe)
    if words is None:
        finetune(*opened(data, family), recipe, tmp_path)
        return
    with pytest.raises(ValueError, match=words):
        finetune(*opened(data, family), recipe, tmp_path)


def finetune(task, load, name, folder):
    recipe = Recipe.preset(name)
    samples, _ = encode(task, [recipe], Training())
    model, new = load()
    tuned = train(
        copy.deepcopy(model), recipe, samples, TRAINING, folder, new=new, tokenizer=task.tokenizer
    )
    assert tuned.history[-1]["update"] == 1
