import pytest
import torch
from torch.utils.data import DataLoader, default_collate

from golden import rehearsal as golden
from holdfast.anneal import Constant, Linear
from holdfast.data import pad_collate
from holdfast.losses import token_losses
from holdfast.methods.identity import Uniform
from holdfast.methods.rehearsal import Rehearsal, draw, mixing_weights
from methods.runs import (
    TASKS,
    collate_for,
    gradient,
    loss_of,
    make_model,
    make_run,
    make_samples,
    recalled,
)


def prepared(task, recall, **fields):
    model = make_model(task)
    old = make_samples(task, n=5, seed=9)
    run = make_run(
        model,
        make_samples(task, n=8),
        task,
        collate=collate_for(task),
        **({"old_data": old} | fields),
    )
    return recalled(recall, run), model


def losses(task, model, samples):
    """The losses of each sample's targets, one sample at a time."""
    found = []
    for sample in samples:
        batch = collate_for(task)([sample])
        logits = model(**{n: v for n, v in batch.items() if n != "labels"})
        found.append(list(token_losses(logits, batch["labels"], task).values))
    return found


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("lam", [0.0, 0.3, 1.0])
def test_over_all_samples_it_is_the_objective_exactly(task, lam):
    criterion, model = prepared(task, Rehearsal(ratio=0.5, anneal=Constant(lam)))
    samples = [criterion.data[i] for i in range(len(criterion.data))]
    assert [s["rehearsal"] for s in samples] == [0] * 8 + [1] * 4
    samples = [{n: v for n, v in s.items() if n != "rehearsal"} for s in samples]
    expected = golden.objective(
        losses(task, model, samples[:8]), losses(task, model, samples[8:]), lam
    )
    ours = loss_of(criterion, model, collate_for(task))
    assert ours.item() == pytest.approx(expected.item(), rel=1e-12)
    found, wanted = gradient(ours, model), gradient(expected, model)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("task", TASKS)
def test_cutting_an_update_changes_nothing(task):
    criterion, model = prepared(task, Rehearsal(ratio=0.5, anneal=Linear(t0=10)))
    whole = loss_of(criterion, model, collate_for(task), num_targets=17.0, update=4)
    parts = [
        loss_of(criterion, model, collate_for(task), part, num_targets=17.0, update=4)
        for part in ([9, 1, 2, 3], [4, 5, 6, 7, 8], [0, 10, 11])
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)


def test_the_weights():
    weights = mixing_weights(torch.tensor([0, 1, 0, 0]), 0.25, 0.2)
    assert weights.tolist() == pytest.approx([0.25 / 0.8, 0.75 / 0.2, 0.25 / 0.8, 0.25 / 0.8])
    assert mixing_weights(torch.tensor([0, 1]), 1.0, 0.5).tolist() == [2.0, 0.0]
    halves = mixing_weights(torch.tensor([0, 0, 0, 1]), 0.75, 0.25)
    assert halves.tolist() == [1.0] * 4  # where λ is the share, nothing is changed


def test_the_update_tells_where_the_annealing_is():
    criterion, model = prepared("classification", Rehearsal(anneal=Linear(t0=4)))
    for update in (1, 2, 4, 9):
        constant, _ = prepared("classification", Rehearsal(anneal=Constant(min(1, update / 4))))
        a = loss_of(criterion, model, default_collate, update=update)
        b = loss_of(constant, model, default_collate, update=1)
        assert torch.equal(a, b)


def test_half_of_each_unless_told():
    plain, model = prepared("classification", Rehearsal())
    half, _ = prepared("classification", Rehearsal(anneal=Constant(0.5)))
    assert torch.equal(*(loss_of(c, model, default_collate) for c in (plain, half)))


@pytest.mark.parametrize("task", TASKS)
def test_no_rehearsal_is_uniform_to_the_bit(task):
    neutral, model = prepared(task, Rehearsal(**Rehearsal.neutral), old_data=None)
    uniform = Uniform().prepare(make_run(model, make_samples(task, n=8), task))
    assert type(neutral) is type(uniform)
    assert torch.equal(*(loss_of(c, model, collate_for(task)) for c in (neutral, uniform)))


class TestDrawing:
    def test_each_once_before_any_twice(self):
        assert sorted(draw(5, 5, seed=0)) == [0, 1, 2, 3, 4]
        assert len(set(draw(100, 30, seed=1))) == 30
        thirteen = draw(5, 13, seed=2)
        assert sorted(thirteen[:5]) == sorted(thirteen[5:10]) == [0, 1, 2, 3, 4]

    def test_by_the_seed(self):
        assert draw(50, 9, seed=1) == draw(50, 9, seed=1) != draw(50, 9, seed=2)

    def test_at_least_one(self):
        criterion, _ = prepared("classification", Rehearsal(ratio=1e-3))
        assert len(criterion.data) == 9

    def test_more_than_there_are(self):
        criterion, _ = prepared("classification", Rehearsal(ratio=2.0))
        assert len(criterion.data) == 24


class TestTables:
    @pytest.fixture
    def tables(self):
        datasets = pytest.importorskip("datasets", reason="the hf extra is not installed")
        new = [{**row, "text": "a"} for row in make_samples("causal_lm", n=8)]
        old = [
            {"origin": i, **row, "text": i} for i, row in enumerate(make_samples("causal_lm", 5, 9))
        ]
        return datasets.Dataset.from_list(new), datasets.Dataset.from_list(old)

    def prepare(self, new, old):
        run = make_run(make_model("causal_lm"), new, "causal_lm", old_data=old, collate=pad_collate)
        return recalled(Rehearsal(ratio=0.5), run), run.model

    def test_the_columns_of_both_are_mixed(self, tables):
        table, model = self.prepare(*tables)
        assert set(table.data.column_names) == {"input_ids", "labels", "rehearsal"}
        assert table.data["rehearsal"][:] == [0] * 8 + [1] * 4
        plain, _ = self.prepare(make_samples("causal_lm", n=8), make_samples("causal_lm", 5, 9))
        assert torch.equal(*(loss_of(c, model, pad_collate) for c in (table, plain)))
        shuffled = table.data.shuffle(seed=1)
        assert sum(shuffled["rehearsal"]) == 4

    def test_a_table_and_a_list(self, tables):
        mixed, model = self.prepare(tables[0], make_samples("causal_lm", 5, 9))
        plain, _ = self.prepare(*tables)
        assert torch.equal(*(loss_of(c, model, pad_collate) for c in (mixed, plain)))

    def test_whole_numbers_of_other_sizes(self, tables):
        import datasets

        narrow = tables[1].cast_column("labels", datasets.Sequence(datasets.Value("int32")))
        mixed, model = self.prepare(tables[0], narrow)
        plain, _ = self.prepare(*tables)
        assert torch.equal(*(loss_of(c, model, pad_collate) for c in (mixed, plain)))

    def test_a_transform_on_the_fly(self, tables):
        def transform(rows):
            return {name: rows[name] for name in ("input_ids", "labels")}

        new, old = (table.with_transform(transform) for table in tables)
        mixed, model = self.prepare(new, old)
        plain, _ = self.prepare(*tables)
        assert torch.equal(*(loss_of(c, model, pad_collate) for c in (mixed, plain)))

    def test_inputs_that_only_one_has(self, tables):
        new, old = tables
        with pytest.raises(ValueError, match=r"\[\] is only in data, \['attention_mask'\] only in"):
            self.prepare(new, old.add_column("attention_mask", [[1]] * 5))
        with pytest.raises(ValueError, match=r"\['labels'\] is only in data"):
            self.prepare(new, old.remove_columns("labels"))
        with pytest.raises(ValueError, match=r"\['labels'\] is only in data"):
            self.prepare(list(new), list(old.remove_columns("labels")))

    def test_labels_of_another_kind(self, tables):
        new, old = tables
        words = old.remove_columns("labels").add_column("labels", ["good"] * 5)
        with pytest.raises(ValueError, match="different types: labels is"):
            self.prepare(new, words)


def test_pairs_from_loaders():
    pairs, old = (
        [(s["x"], s["labels"]) for s in make_samples("classification", n, seed)]
        for n, seed in ((8, 0), (5, 9))
    )
    run = make_run(
        torch.nn.Linear(3, 4).double(),
        DataLoader(pairs),
        "classification",
        old_data=DataLoader(old),
    )
    criterion = recalled(Rehearsal(ratio=0.5), run)
    assert [s[2] for s in criterion.data] == [0] * 8 + [1] * 4
    assert criterion.recall.share == pytest.approx(1 / 3)
    loss_of(criterion, run.model, default_collate).backward()


def test_a_loss_function_of_the_users():
    def task(model, batch):
        return (model(x=batch["x"]).sum(1) - batch["labels"]).square()

    samples, old = make_samples("classification", 8), make_samples("classification", 5, 9)
    model = make_model("classification")
    run = make_run(model, samples, task, old_data=old, collate=default_collate)
    criterion = recalled(Rehearsal(ratio=0.5, anneal=Constant(0.3)), run)
    ours = loss_of(criterion, model, default_collate, num_targets=12.0)
    chosen = [old[i] for i in draw(5, 4, seed=0)]
    new, rehearsed = (task(model, default_collate(part)).mean() for part in (samples, chosen))
    torch.testing.assert_close(ours, 0.3 * new + 0.7 * rehearsed)


class TestRefused:
    def test_no_data_of_the_old_task(self):
        with pytest.raises(ValueError, match="pass it as old_data="):
            prepared("classification", Rehearsal(), old_data=None)
        with pytest.raises(ValueError, match="the old_data is empty"):
            prepared("classification", Rehearsal(), old_data=[])

    def test_a_stream(self):
        with pytest.raises(ValueError, match="old_data must be indexed samples"):
            prepared("classification", Rehearsal(), old_data=iter(make_samples("classification")))

    def test_samples_of_another_form(self):
        pairs = [(s["x"], s["labels"]) for s in make_samples("classification")]
        with pytest.raises(ValueError, match="must have the same type and length"):
            prepared("classification", Rehearsal(), old_data=pairs)

    def test_no_targets(self):
        old = [{"input_ids": [1, 2], "labels": [-100, -100]}]
        with pytest.raises(ValueError, match="no sample of the old_data has a target"):
            prepared("causal_lm", Rehearsal(), old_data=old)

    def test_settings(self):
        with pytest.raises(ValueError, match="ratio must be"):
            Rehearsal(ratio=-0.1)
        with pytest.raises(TypeError, match="anneal must be an annealing"):
            Rehearsal(anneal=0.5)
