import copy

import pytest
import torch
from torch import nn

from holdfast import Flow, PretrainedHead, linear_probe, score, weighted_loss


class Vision(nn.Module):
    """A body with BatchNorm and dropout, and a head."""

    def __init__(self, classes=5):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(8, classes)

    def forward(self, x):
        return self.classifier(self.dropout(self.features(x).mean((2, 3))))


def images(n=120, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.randn(n, 1, 6, 6, generator=generator)
    x[:, 0, 0] += y[:, None] * 1.5
    return torch.utils.data.TensorDataset(x, y)


@pytest.fixture
def model():
    model = Vision()
    model.features[1].running_mean.normal_()
    return model.train()


def probe(model, head, data, **options):
    return linear_probe(model, head, data, progress=False, **options)


def test_it_reaches_the_minimum(model):
    data, head, l2 = images(), nn.Linear(8, 3), 1e-3
    probe(model.features, head := nn.Sequential(nn.Flatten(), nn.Linear(128, 3)), data, l2=l2)
    with torch.no_grad():
        features = copy.deepcopy(model.features).eval()(data.tensors[0])
    loss = nn.functional.cross_entropy(head(features), data.tensors[1])
    loss = loss + 0.5 * l2 * head[1].weight.square().sum()
    gradient = torch.autograd.grad(loss, list(head.parameters()))
    assert max(g.abs().max() for g in gradient) < 1e-3


def test_only_the_head_changes(model):
    before = copy.deepcopy(model.state_dict())
    model.features.requires_grad_(False)
    final = probe(model, model.classifier, images())
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]) != name.startswith("classifier"), name
    assert model.training
    assert [p.requires_grad for p in model.features.parameters()] == [False] * 4
    assert all(p.grad is None for p in model.parameters())
    scores = score(model, images(), task="classification", cache=False, progress=False)
    assert scores.losses.mean().item() == pytest.approx(final, rel=1e-5)


def test_a_head_inside_and_one_outside_are_fitted_alike(model):
    outside = copy.deepcopy(model.classifier)
    headless = copy.deepcopy(model)
    headless.classifier = nn.Identity()
    one = probe(model, model.classifier, images())
    two = probe(headless, outside, images())
    assert one == pytest.approx(two, rel=1e-6)
    assert torch.allclose(outside.weight, model.classifier.weight, atol=1e-5)


def test_regression():
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(0))
    y = x @ torch.tensor([1.0, -2.0, 0.5, 0.0]) + 3
    head = nn.Linear(4, 1)
    data = torch.utils.data.TensorDataset(x, y)
    final = probe(nn.Linear(4, 4).requires_grad_(False), head, data, task="regression", l2=0.0)
    assert final < 1e-6


def test_bad_features_leave_the_head_as_it_was(model):
    x, y = images().tensors
    x[3] = torch.nan
    before = model.classifier.weight.clone()
    with pytest.raises(ValueError, match="features hold infinite or not-a-number values"):
        probe(model, model.classifier, torch.utils.data.TensorDataset(x, y))
    assert torch.equal(model.classifier.weight, before)
    with pytest.raises(ValueError, match="the data is empty"):
        probe(model, model.classifier, [])
    with pytest.raises(ValueError, match="l2 must be"):
        probe(model, model.classifier, images(), l2=-1.0)


class TestPretrainedHead:
    def test_the_pretrained_model_is_seen_again(self, model):
        x = images().tensors[0]
        with torch.no_grad():
            expected = copy.deepcopy(model).eval()(x)
        kept = PretrainedHead.of(model, "classifier")
        model.classifier = nn.Linear(8, 3)
        model.train()
        model(x)  # moves the running statistics
        tuned = copy.deepcopy(model.state_dict())
        with kept.on(model) as seen, torch.no_grad():
            assert torch.allclose(seen(x), expected)
            assert not seen.training
        assert model.training
        assert all(torch.equal(a, tuned[n]) for n, a in model.state_dict().items())

    def test_an_error_inside_puts_everything_back(self, model):
        kept = PretrainedHead.of(model, "classifier")
        model.classifier = new = nn.Linear(8, 3)
        with pytest.raises(RuntimeError, match="evaluation"), kept.on(model):
            raise RuntimeError("evaluation")
        assert model.classifier is new

    def test_an_unknown_part(self, model):
        with pytest.raises(ValueError, match="no part 'head'; it has features, dropout"):
            PretrainedHead.of(model, "head")


def test_flow_with_a_new_head_from_end_to_end(model):
    """Probe, score, fine-tune with the weights, see what was kept."""
    data = images()
    x, y = data.tensors
    kept = PretrainedHead.of(model, "classifier")
    model.classifier = nn.Linear(8, 3)
    probe(model, model.classifier, data)
    scores = score(model, data, task="classification", cache=False, progress=False)
    weights = Flow().weigh(scores)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model.eval()
    first = weighted_loss(model(x), y, weights, "classification").item()
    for _ in range(20):
        loss = weighted_loss(model(x), y, weights, "classification")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < first
    with kept.on(model):
        assert model(x).shape == (120, 5)
