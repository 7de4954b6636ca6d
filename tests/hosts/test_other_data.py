"""Every host refuses to resume a run with other data."""

import itertools
import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from holdfast import Recipe, Rehearsal, Run
from holdfast._torch.fingerprint import data_fingerprint
from matrices import sampled

pytest.importorskip("transformers", reason="the hf extra is not installed")
datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")

SAVING = {"save_strategy": "steps", "save_steps": 2, "num_train_epochs": 2}
WHERE = "other data, or the same in another order"


def changed(data):
    """The same rows in another order, and one row that is another's."""
    order = list(range(len(data)))
    twice = [0, 0, *order[2:]]
    return [data.select(rows) for rows in (order[::-1], twice)]


@pytest.mark.parametrize("names", sampled(["standard", "recadam", "flow"], ["flow"]))
def test_the_trainer(names, tmp_path, monkeypatch):
    from hosts.test_hf import make_data, make_trainer

    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    options = SAVING | {"per_device_train_batch_size": 4}

    def trainer(data):
        return make_trainer(Recipe.preset(names), tmp_path, data=data, options=options)

    trainer(make_data()).train()
    for other in (*changed(make_data()), make_data(10), make_data(seed=1)):
        with pytest.raises(ValueError, match=WHERE):
            trainer(other).train(resume_from_checkpoint=True)
    same = make_data().map(lambda row: row)  # of which datasets' own fingerprint is another
    trainer(same).train(resume_from_checkpoint=True)


def test_the_trainers_rehearsal(tmp_path):
    from hosts.test_hf import make_data, make_trainer

    def trainer(seed):
        return make_trainer(
            Recipe(recall=Rehearsal()), tmp_path, options=SAVING, old_data=make_data(seed=seed)
        )

    trainer(1).train()
    with pytest.raises(ValueError, match="other old_data"):
        trainer(2).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("names", "packing"),
    sampled(itertools.product(["recadam", "flow"], [False, True]), [("flow", True)]),
)
def test_trl(names, packing, tmp_path, monkeypatch):
    pytest.importorskip("trl", reason="the trl extra is not installed")
    from hosts.test_trl import QUESTIONS, make_trainer

    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))

    def trainer(rows):
        options = SAVING | {"per_device_train_batch_size": 4, "packing": packing}
        return make_trainer(Recipe.preset(names), tmp_path, rows, options=options)

    trainer(QUESTIONS).train()
    with pytest.raises(ValueError, match=WHERE):
        trainer(QUESTIONS[::-1]).train(resume_from_checkpoint=True)
    trainer(QUESTIONS).train(resume_from_checkpoint=True)


def test_accelerate(tmp_path):
    accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")
    from accelerate.state import AcceleratorState, GradientState, PartialState

    from holdfast.hosts.accelerate import AccelerateLoop
    from hosts.test_accelerate import SETTINGS, make_data, make_model

    def loop(data):
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()
        run = Run(Recipe(), make_model(), data, **SETTINGS)
        return AccelerateLoop(accelerate.Accelerator(cpu=True), run)

    loop(make_data()).accelerator.save_state(str(tmp_path))
    backwards = torch.utils.data.TensorDataset(*(t.flip(0) for t in make_data().tensors))
    with pytest.raises(ValueError, match=WHERE):
        loop(backwards).accelerator.load_state(str(tmp_path))
    loop(make_data()).accelerator.load_state(str(tmp_path))


@pytest.mark.filterwarnings("ignore")  # Lightning's own
def test_lightning(tmp_path):
    pytest.importorskip("lightning", reason="the lightning extra is not installed")
    from hosts.test_lightning import Mine, make_data, make_trainer, save_every

    def fit(data, ckpt_path=None):
        options = {"enable_checkpointing": True, "callbacks": [save_every(tmp_path, 2)]}
        make_trainer(tmp_path, **options).fit(Mine(Recipe(), data=data), ckpt_path=ckpt_path)

    fit(make_data())
    saved = str(tmp_path / "step=2.ckpt")
    backwards = torch.utils.data.TensorDataset(*(t.flip(0) for t in make_data().tensors))
    with pytest.raises(ValueError, match=WHERE):
        fit(backwards, saved)
    fit(make_data(), saved)


class Augmented(Dataset):
    def __len__(self):
        return 9

    def __getitem__(self, i):
        return torch.rand(2), np.random.rand(), random.random()


class Stream(IterableDataset):
    def __len__(self):
        return 9

    def __iter__(self):
        raise AssertionError


def test_random_and_iterable_data_has_no_fingerprint():
    def draw():
        return float(torch.rand(())), np.random.rand(), random.random()

    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    assert data_fingerprint(Augmented()) is None
    assert data_fingerprint(Stream()) is None
    assert data_fingerprint(iter([1])) is None
    found = draw()
    for restore, state in zip(
        (torch.set_rng_state, np.random.set_state, random.setstate), states, strict=True
    ):
        restore(state)
    assert draw() == found  # reading it has drawn nothing


def test_every_row_counts():
    data = [{"input_ids": [i, i + 1]} for i in range(3000)]
    changed = [*data[:1001], {"input_ids": [7, 7]}, *data[1002:]]
    assert data_fingerprint(data) == data_fingerprint(list(data))
    assert data_fingerprint(data) != data_fingerprint(changed)
    tables = [datasets.Dataset.from_list(rows) for rows in (data, list(data), changed)]
    assert data_fingerprint(tables[0]) == data_fingerprint(tables[1])
    assert data_fingerprint(tables[0]) != data_fingerprint(tables[2])
    assert data_fingerprint([]) == data_fingerprint([])
    assert data_fingerprint([1]) != data_fingerprint([1, 1])


def test_subsets_have_their_own_fingerprint(tmp_path):
    """The data of a DataLoader is its dataset, but a Subset is not its dataset."""
    data = torch.utils.data.TensorDataset(torch.arange(24.0)[:, None], torch.arange(24) % 2)
    parts = [torch.utils.data.Subset(data, range(12)), torch.utils.data.Subset(data, range(12, 24))]
    one, other = (
        Run(Recipe(), torch.nn.Linear(1, 2), part, lr=0.1, task="classification") for part in parts
    )
    with pytest.raises(ValueError, match=WHERE):
        other.check_identity(one.identity(), "there")
    loader = torch.utils.data.DataLoader(parts[0])
    of_loader = Run(Recipe(), torch.nn.Linear(1, 2), loader, lr=0.1, task="classification")
    of_loader.check_identity(one.identity(), "there")


def test_data_without_a_fingerprint_is_accepted():
    data = torch.utils.data.TensorDataset(torch.zeros(3, 1), torch.zeros(3).long())
    run = Run(Recipe(), torch.nn.Linear(1, 2), data, lr=0.1, task="classification")
    run.check_identity(run.identity() | {"data": None}, "there")
