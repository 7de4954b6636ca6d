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


def literal_minimum(features, y, l2):
    """Newton's method on the same problem, float64."""
    x = torch.cat([features.double(), torch.ones(len(features), 1).double()], 1)
    theta = torch.zeros(int(y.max()) + 1, x.shape[1], dtype=torch.float64)
    decay = torch.full_like(theta, l2)
    decay[:, -1] = 0

    def objective(t):
        t = t.view_as(theta)
        return nn.functional.cross_entropy(x @ t.T, y) + 0.5 * (decay * t * t).sum()

    flat = theta.flatten()
    for _ in range(100):
        gradient = torch.autograd.functional.jacobian(objective, flat)
        hessian = torch.autograd.functional.hessian(objective, flat)
        step = torch.linalg.lstsq(hessian + 1e-10 * torch.eye(len(flat)), gradient).solution
        rate = 1.0
        while objective(flat - rate * step) > objective(flat) and rate > 1e-8:
            rate /= 2
        flat = flat - rate * step
        if gradient.abs().max() < 1e-9:
            break
    return objective(flat).item()


@pytest.mark.parametrize("kind", ["plain", "shifted", "scales", "dead", "no bias"])
def test_it_reaches_the_minimum(kind):
    generator = torch.Generator().manual_seed(5)
    y = torch.arange(300) % 3
    features = torch.randn(300, 5, generator=generator) + y[:, None] * torch.linspace(-1, 1, 5)
    if kind == "shifted":
        features = features.relu() + 30
    if kind == "scales":
        features = features * torch.logspace(-2, 2, 5)
    if kind == "dead":
        features[:, 1] = 0.3
        features[:, 3] = 0.0
    head, l2 = nn.Linear(5, 3, bias=kind != "no bias"), 1e-3
    data = torch.utils.data.TensorDataset(features, y)
    probe(Same(), head, data, l2=l2)
    weight, bias = head.weight.detach().double(), head.bias
    outputs = features.double() @ weight.T + (0 if bias is None else bias.detach().double())
    found = nn.functional.cross_entropy(outputs, y) + 0.5 * l2 * weight.square().sum()
    if kind != "no bias":
        assert found.item() == pytest.approx(literal_minimum(features, y, l2), rel=1e-5)
    else:
        w = weight.clone().requires_grad_()
        loss = nn.functional.cross_entropy(features.double() @ w.T, y) + 0.5 * l2 * w.square().sum()
        assert torch.autograd.grad(loss, w)[0].abs().max() < 1e-5


class Same(nn.Module):
    """Features that are their own model's output."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x


def test_too_few_iterations_are_said():
    data = torch.utils.data.TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    with pytest.warns(UserWarning, match="the probe has not converged after 1 iterations"):
        probe(Same(), nn.Linear(5, 3), data, max_iterations=1)


def test_half_precision_models():
    data = torch.utils.data.TensorDataset(torch.randn(60, 5).bfloat16(), torch.arange(60) % 3)
    head = nn.Linear(5, 3).bfloat16()
    assert probe(Same(), head, data) < 1.2
    assert head.weight.dtype == torch.bfloat16


def test_heads_that_get_no_row_a_sample_are_refused(model):
    data = torch.utils.data.TensorDataset(torch.randn(6, 4, 5), torch.arange(6) % 3)
    with pytest.raises(ValueError, match=r"features of shape \(6, 4, 5\), but needs one row per"):
        probe(Same(), nn.Linear(5, 3), data)
    unused = nn.Linear(8, 3)
    model.other = unused
    with pytest.raises(ValueError, match="did not run the head"):
        probe(model, unused, images())
    with pytest.raises(ValueError, match="task must be classification"):
        probe(model, model.classifier, images(), task="causal_lm")


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
    one = probe(model, "classifier", images())
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
    with pytest.raises(ValueError, match="features contain infinite or NaN values"):
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

    def test_statistics_that_are_gone_are_said(self, model):
        kept = PretrainedHead.of(model, "classifier")
        model.features[1] = nn.Identity()
        message = r"no buffers for the saved statistics: features\.1\.running_mean"
        with pytest.raises(ValueError, match=message), kept.on(model):
            pass

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


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_decoders_head_is_read_at_the_last_token(side):
    transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_labels=2, pad_token_id=0,
    )  # fmt: skip
    model = transformers.LlamaForSequenceClassification(config)
    batches = []
    for _ in range(16):
        ids = torch.randint(1, 30, (4, 6))
        labels = ids[:, -1 if side == "left" else 2] % 2  # the last token tells
        ids[:, :3] = ids[:, :3] if side == "right" else 0
        ids[:, 3:] = ids[:, 3:] if side == "left" else 0
        batches.append({"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels})
    loss = linear_probe(model, model.score, batches, task="classification", l2=1e-6)
    with torch.no_grad():
        outputs = [model(**batch).loss.item() for batch in batches]
    assert sum(outputs) / len(outputs) == pytest.approx(loss, abs=1e-4)
    assert loss < 0.6
