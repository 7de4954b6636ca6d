"""Small models, data and runs for objectives."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.utils.data import default_collate

from holdfast.data import pad_collate
from holdfast.losses import count_targets

TASKS = ["classification", "multi_label", "regression", "causal_lm", "token_classification"]
TOKENS = ("causal_lm", "token_classification")
CLASSES = (*TOKENS, "classification")


class Net(nn.Module):
    """Vectors or tokens in, outputs for each; dropout, so that its mode can be told."""

    def __init__(self, tokens, outputs=4, dropout=0.0):
        super().__init__()
        self.stem = nn.Embedding(9, 5) if tokens else nn.Linear(3, 5)
        self.hidden = nn.Linear(5, 5)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(5, outputs)

    def forward(self, input_ids=None, attention_mask=None, x=None):
        h = self.stem(x if input_ids is None else input_ids)
        return self.head(self.dropout(torch.tanh(self.hidden(h))))


def make_model(task, seed=0, dropout=0.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(task in TOKENS, dropout=dropout).double()


def moved(model, size=0.3):
    """The model some way from where it began."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p += size * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(p)
    return model


def make_samples(task, n=7, seed=0):
    """Mappings; token sequences of several lengths, some of whose labels do not count."""
    g = torch.Generator().manual_seed(seed)
    samples = []
    for i in range(n):
        if task in TOKENS:
            length = 3 + (i * 2 + seed) % 4
            ids = torch.randint(0, 9, (length,), generator=g).tolist()
            labels = torch.randint(0, 4, (length,), generator=g).tolist()
            labels[: 1 + i % 2] = [-100] * (1 + i % 2)
            samples.append({"input_ids": ids, "labels": labels})
            continue
        x = torch.randn(3, generator=g, dtype=torch.float64)
        label = {
            "classification": torch.randint(0, 4, (), generator=g),
            "multi_label": torch.randint(0, 2, (4,), generator=g),
            "regression": torch.randn(4, generator=g, dtype=torch.float64),
        }[task]
        samples.append({"x": x, "labels": label})
    return samples


def collate_for(task):
    return pad_collate if task in TOKENS else default_collate


def make_run(model, data, task, *, trainable=None, **fields):
    """What an objective is given; a real Run is made in tests/contract."""
    from holdfast.methods.identity import Full

    recipe = SimpleNamespace(trainable=Full() if trainable is None else trainable)
    defaults = {
        "collate": None, "new": (), "reference": None, "old_data": None, "old_head": None,
        "seed": 0, "cache": False, "progress": False, "total_updates": 0, "autocast": None,
    }  # fmt: skip
    tasks = {"task": task, "given_task": task}
    return SimpleNamespace(recipe=recipe, model=model, data=data, **(defaults | tasks | fields))


def recalled(recall, run, objective=None):
    """The criterion of an objective with a recall, prepared as a Run does it."""
    from holdfast.methods.identity import Uniform

    run.criterion = (objective or Uniform()).prepare(run)
    run.criterion.recall = recall.prepare(run)
    return run.criterion


def batch_of(criterion, collate, indices=None):
    from holdfast._torch.batch import normalized
    from holdfast.columns import keeping

    indices = range(len(criterion.data)) if indices is None else indices
    return normalized(keeping(collate, *criterion.columns)([criterion.data[i] for i in indices]))


def loss_of(criterion, model, collate, indices=None, update=1, num_targets=None):
    """The loss of some samples as one batch."""
    batch = batch_of(criterion, collate, indices)
    if num_targets is None:
        labels = batch["labels"] if isinstance(batch, dict) else batch[1]
        num_targets = float(count_targets(labels, criterion.task).sum())
    return criterion.loss(model, batch, num_targets, update)


def outputs_and_labels(model, samples):
    """Sample by sample, without padding, as the golden twins want them."""
    outputs, labels = [], []
    for sample in samples:
        inputs = {n: torch.as_tensor(v)[None] for n, v in sample.items() if n != "labels"}
        outputs.append(model(**inputs)[0])
        labels.append(torch.as_tensor(sample["labels"]))
    return outputs, labels


def gradient(loss, model):
    model.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])
