"""Pairs of methods across the stages train together and resume exactly.

The normal run takes a sample in which every method occurs; the soak takes all pairs.
"""

import itertools
import random
from collections import Counter

import pytest
import torch
from setting import ENTRIES, Stopped, assert_same_bits, method_of, recipe_of, stop_at, train

PAIRS = [
    (a, b)
    for a, b in itertools.combinations(ENTRIES, 2)
    if a.stage != b.stage or a.stage == "penalties"
]
#: Pairs that cannot be combined, and a word of the reason.
REFUSED = {
    ("linear-probe", "random-init"): "random",
    ("lp-ft", "random-init"): "random",
    ("hft", "random-init"): "random",
    ("gradual-unfreezing", "random-init"): "random",
    ("lora", "random-init"): "random",
    ("lora", "ties"): "effective weights",
    ("lora", "dare"): "effective weights",
    ("lora", "fapm"): "effective weights",
    ("lora", "slerp"): "effective weights",
    ("osft", "random-init"): "random",
    ("adapter", "random-init"): "random",
    ("adapter", "ties"): "effective weights",
    ("adapter", "dare"): "effective weights",
    ("adapter", "fapm"): "effective weights",
    ("adapter", "slerp"): "effective weights",
    ("random-init", "adamw"): "pull",
    ("random-init", "sgd"): "pull",
    ("random-init", "mofo"): "pull",
    ("random-init", "spd"): "pull",
    ("random-init", "finch"): "pull",
    ("lp-ft", "auto"): "causal_lm",
    ("lp-ft", "self-replay"): "causal_lm",
}


def pair_id(pair):
    return f"{pair[0].name}+{pair[1].name}"


def make_sense(pair):
    return (pair[0].name, pair[1].name) not in REFUSED


SENSIBLE = list(filter(make_sense, PAIRS))


def sample(pairs, often=2):
    """Pairs in which every method occurs at least ``often`` times, where it has as many."""
    chosen, seen = [], Counter()
    for pair in random.Random(0).sample(pairs, len(pairs)):
        if min(seen[entry.name] for entry in pair) < often:
            chosen.append(pair)
            seen.update(entry.name for entry in pair)
    return chosen


SAMPLE = sample(SENSIBLE)


@pytest.mark.parametrize(
    "pair",
    [pytest.param(p, marks=() if p in SAMPLE else pytest.mark.soak) for p in SENSIBLE],
    ids=map(pair_id, SENSIBLE),
)
def test_a_pair_trains_and_resumes(pair, tmp_path):
    recipe = recipe_of(*map(method_of, pair))
    assert type(recipe).from_yaml(recipe.to_yaml()) == recipe
    options = {"max_updates": 9, "log_every": 1}
    whole = train(recipe, **options)
    assert all(p.isfinite().all() for p in whole.parameters())
    path = tmp_path / "run.pt"
    with pytest.raises(Stopped):
        train(recipe, checkpoint=path, save_every=2, log=stop_at(5), **options)
    torch.manual_seed(999)
    assert_same_bits(train(recipe, checkpoint=path, **options), whole)


@pytest.mark.parametrize("pair", list(REFUSED), ids="+".join)
def test_a_pair_that_makes_no_sense_is_refused_with_the_reason(pair):
    by_name = {entry.name: entry for entry in ENTRIES}
    with pytest.raises(ValueError, match=REFUSED[pair]):
        train(recipe_of(*(by_name[name].cls() for name in pair)))


def test_all_pairs_are_here():
    assert len(PAIRS) == 752
