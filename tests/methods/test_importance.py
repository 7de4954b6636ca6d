import math

import pytest
import torch
from torch import nn

from holdfast import EWC, L2SP, MAS, Reference
from holdfast._optim import importance as _importance
from holdfast.optim import attach_penalties, fisher_importance, mas_importance
from methods.problems import backward, far, make_net
from scoring.lm import gsm8k, small_llama

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")


def fisher(model, data, **options):
    return fisher_importance(model, data, progress=False, **options)


class TestLogisticRegression:
    """Two classes whose logits are (0, w·x): F = E[p(1−p)x²] in closed form."""

    @pytest.fixture
    def problem(self):
        generator = torch.Generator().manual_seed(0)
        model = nn.Linear(4, 2)
        x = torch.randn(20_000, 4, generator=generator)
        return model, x

    def analytic(self, model, x):
        p = model(x).softmax(-1).detach()
        # Of the softmax: F(w_ci) = E[p_c(1 − p_c)·x_i²].
        return torch.einsum("nc,ni->ci", p * (1 - p), x.square()) / len(x)

    def test_true(self, problem):
        model, x = problem
        found = fisher(model, [(x, torch.zeros(len(x), dtype=torch.long))], task="classification")
        assert torch.allclose(found["weight"], self.analytic(model, x), rtol=0.05)

    def test_empirical(self, problem):
        model, x = problem
        y = (x[:, 0] > 0).long()
        found = fisher(model, [(x, y)], task="classification", kind="empirical")
        p = model(x).softmax(-1).detach()
        residual = (p - nn.functional.one_hot(y, 2)).square()
        expected = torch.einsum("nc,ni->ci", residual, x.square()) / len(x)
        assert torch.allclose(found["weight"], expected, rtol=1e-4)
        assert torch.allclose(found["bias"], residual.mean(0), rtol=1e-4)

    def test_seeds(self, problem):
        model, x = problem
        data = [(x[:50], torch.zeros(50, dtype=torch.long))]
        one, two, again = (
            fisher(model, data, task="classification", seed=s)["weight"] for s in (1, 2, 1)
        )
        assert torch.equal(one, again)
        assert not torch.equal(one, two)


def test_it_does_not_depend_on_batches():
    net = make_net(torch.float32)
    x = torch.randn(12, 6)
    y = torch.arange(12) % 3
    one = fisher(net, [(x, y)], task="classification", kind="empirical")
    batches = list(zip(x.split(5), y.split(5), strict=True))
    many = fisher(net, batches, task="classification", kind="empirical")
    for name in one:
        assert torch.allclose(one[name], many[name], rtol=1e-4, atol=1e-8)


def test_models_that_cannot_be_mapped_over_samples_go_one_by_one():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() > -1e9 else x  # data-dependent control flow

    net = Branching()
    data = [(torch.randn(5, 6), torch.arange(5) % 3)]
    options = {"task": "classification", "kind": "empirical"}
    found, plain = fisher(net, data, **options), fisher(net.layer, data, **options)
    assert torch.allclose(found["layer.weight"], plain["weight"], rtol=1e-5)


@pytest.mark.parametrize("kind", ["true", "empirical"])
def test_a_causal_model_on_real_text(shared_data, kind):
    """Against one backward pass a sample."""
    model, rows = small_llama(), gsm8k(shared_data, 5)
    found = fisher(model, rows, kind=kind)
    assert set(found) == {n for n, _ in model.named_parameters()}
    assert all(float(f.sum()) > 0 for f in found.values())
    if kind == "empirical":
        expected = torch.zeros_like(model.lm_head.weight)
        for row in rows:
            model.zero_grad()
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
            count = int((labels[:, 1:] != -100).sum())
            (model(input_ids=ids, labels=labels).loss * count).backward()
            expected += model.lm_head.weight.grad.square() / len(rows)
        assert torch.allclose(found["lm_head.weight"], expected, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("apart", [True, False])
def test_labels_are_drawn_where_there_are_targets(shared_data, monkeypatch, apart):
    """If what is drawn is the likeliest token, it is the empirical Fisher of those tokens."""
    model, rows, drawn = small_llama(), gsm8k(shared_data, 3), []

    def likeliest(probabilities, count, generator):
        drawn.append(len(probabilities))
        return probabilities.argmax(-1, keepdim=True)

    monkeypatch.setattr(torch, "multinomial", likeliest)
    own = []
    for row in rows:
        said = model(input_ids=torch.tensor([row["input_ids"]])).logits[0].argmax(-1).tolist()
        labels = [-100 if y == -100 else said[t - 1] for t, y in enumerate(row["labels"])]
        own.append({**row, "labels": labels})
    expected = fisher(model, own, kind="empirical")
    if not apart:
        model.get_output_embeddings = lambda: nn.Linear(32, 258)
    found = fisher(model, rows, kind="true")
    assert sum(drawn) == sum(y != -100 for row in rows for y in row["labels"])
    for name in expected:
        assert torch.allclose(found[name], expected[name], rtol=1e-3, atol=1e-7)


class TestMemory:
    """Gradients of as many samples at a time as there is room for: the figures are the same."""

    @pytest.fixture
    def data(self):
        generator = torch.Generator().manual_seed(0)
        return [(torch.randn(13, 6, generator=generator), torch.arange(13) % 3)]

    def check(self, data, expected):
        found = fisher(make_net(torch.float32), data, task="classification")
        for name in expected:
            assert torch.allclose(found[name], expected[name], rtol=1e-5, atol=1e-9)

    def test_one_by_one(self, data, monkeypatch):
        expected = fisher(make_net(torch.float32), data, task="classification")
        monkeypatch.setattr(_importance, "_BYTES", 1)
        monkeypatch.setattr(_importance, "vmap", lambda *_, **__: None)  # would fail if called
        self.check(data, expected)

    def test_halved_where_it_runs_out(self, data, monkeypatch):
        expected = fisher(make_net(torch.float32), data, task="classification")
        real, tried = _importance.vmap, []

        def tight(*args, **options):
            def run(parameters, inputs, labels):
                tried.append(len(labels))
                if len(labels) > 4:
                    raise torch.OutOfMemoryError("no room")
                return real(*args, **options)(parameters, inputs, labels)

            return run

        monkeypatch.setattr(_importance, "vmap", tight)
        self.check(data, expected)
        assert tried == [13, 6, 3, 3, 3, 3, 1]


class TestWhatIsLookedAt:
    def test_only_what_requires_gradients(self):
        net = make_net(torch.float32)
        data = [(torch.randn(6, 6), torch.arange(6) % 3)]
        options = {"task": "classification", "kind": "empirical"}
        whole = fisher(net, data, **options)
        net.body.requires_grad_(False)
        net.body.extra = nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
        found = fisher(net, data, **options)
        assert set(found) == {"head.weight", "head.bias"}
        assert torch.allclose(found["head.weight"], whole["head.weight"], rtol=1e-5)
        net.requires_grad_(False)
        with pytest.raises(ValueError, match="no parameter of Net requires a gradient"):
            fisher(net, data, **options)

    def test_float64_stays_float64(self):
        """Against one backward pass a sample, far closer than float32 could be."""
        net = make_net()
        x, y = torch.randn(5, 6).double(), torch.arange(5) % 3
        found = fisher(net, [(x, y)], task="classification", kind="empirical")
        expected = torch.zeros_like(net.body[0].weight)
        for i in range(5):
            net.zero_grad()
            nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
            expected += net.body[0].weight.grad.square() / 5
        assert found["body.0.weight"].dtype == torch.float64
        assert torch.allclose(found["body.0.weight"], expected, rtol=1e-12, atol=0)
        assert mas_importance(net, [(x, y)], progress=False)["head.bias"].dtype == torch.float64

    def test_the_result_knows_the_parameters(self):
        net = make_net(torch.float32)
        found = fisher(net, [(torch.randn(4, 6), torch.arange(4) % 3)], task="classification")
        assert found.match(list(net.parameters()), None)[0] is found["body.0.weight"]

    def test_layers_with_kernels_of_their_own(self):
        """As quantised ones: not even torch.func's grad can go through them."""

        class Times(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x, w):  # the old style, without setup_context
                ctx.save_for_backward(x, w)
                return x @ w.t()

            @staticmethod
            def backward(ctx, g):
                x, w = ctx.saved_tensors
                return g @ w, g.t() @ x

        class Own(nn.Module):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(6, 3, bias=False)
                self.unused = nn.Parameter(torch.zeros(2))

            def forward(self, x):
                return Times.apply(x, self.layer.weight)

        net = Own()
        data = [(torch.randn(5, 6), torch.arange(5) % 3)]
        options = {"task": "classification", "kind": "empirical"}
        found, plain = fisher(net, data, **options), fisher(net.layer, data, **options)
        assert torch.allclose(found["layer.weight"], plain["weight"], rtol=1e-5)
        assert float(found["unused"].sum()) == 0.0


def test_mas_of_a_linear_model():
    """‖Wx‖² has the gradient 2(Wx)xᵀ."""
    model = nn.Linear(3, 2, bias=False)
    x = torch.randn(7, 3)
    found = mas_importance(model, [(x, torch.zeros(7))], progress=False)
    outputs = model(x).detach()
    expected = (2 * torch.einsum("nc,ni->nci", outputs, x)).abs().mean(0)
    assert torch.allclose(found["weight"], expected, rtol=1e-5)


def test_normalized_to_a_mean_of_one():
    net = make_net(torch.float32)
    data = [(torch.randn(6, 6), torch.arange(6) % 3)]
    found = fisher(net, data, task="classification", normalize=True)
    total = sum(float(f.sum()) for f in found.values())
    assert total / sum(f.numel() for f in found.values()) == pytest.approx(1.0, rel=1e-5)


@pytest.mark.parametrize("cls", [EWC, MAS])
@pytest.mark.parametrize("coupled", [False, True])
def test_the_penalty_follows_the_literal_rule(cls, coupled):
    net, beta, lr = make_net(), 2.0, 0.05
    reference = Reference.of(net)
    weights = {n: torch.rand_like(p) * 3 for n, p in net.named_parameters()}
    opt = torch.optim.SGD(net.named_parameters(), lr=lr)
    attached = attach_penalties(opt, [cls(beta, coupled=coupled)], reference, Reference(weights))
    twin = {n: p.detach().clone() for n, p in net.named_parameters()}
    for t in range(30):
        backward(net, t)
        for n, p in net.named_parameters():
            star, g = reference[n], p.grad.clone()
            if coupled:
                twin[n] = twin[n] - lr * (g + beta * weights[n] * (twin[n] - star))
            else:
                moved = twin[n] - lr * g
                share = (lr * beta * weights[n]).clamp(max=1.0)
                twin[n] = moved - share * (moved - star)
        opt.step()
    for n, p in net.named_parameters():
        assert torch.allclose(p, twin[n], rtol=0, atol=1e-12)
    expected = sum(
        0.5 * beta * float((weights[n] * (p.detach() - reference[n]).square()).sum())
        for n, p in net.named_parameters()
    )
    assert attached.values()[cls.__name__] == pytest.approx(expected, rel=1e-4)


def test_uniform_importance_is_l2sp():
    nets = [make_net(), make_net()]
    for net, penalty in zip(nets, (EWC(2.0), L2SP(2.0)), strict=True):
        opt = torch.optim.SGD(net.named_parameters(), lr=0.05)
        ones = Reference({n: torch.ones_like(p) for n, p in net.named_parameters()})
        attach_penalties(opt, [penalty], Reference.of(net), ones)
        for t in range(10):
            backward(net, t)
            opt.step()
    assert far(*nets) < 1e-14


def test_what_is_of_no_importance_is_not_touched():
    nets = [make_net(torch.float32), make_net(torch.float32)]
    opts = [torch.optim.SGD(n.named_parameters(), lr=0.05) for n in nets]
    zero = Reference({n: torch.zeros_like(p) for n, p in nets[0].named_parameters()})
    attach_penalties(opts[0], [EWC(2.0)], Reference.of(nets[0]), zero)
    for t in range(20):
        for net, opt in zip(nets, opts, strict=True):
            backward(net, t)
            opt.step()
    assert far(*nets) == 0.0


def test_refused():
    net = make_net(torch.float32)
    opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
    with pytest.raises(ValueError, match="EWC weights each coordinate: pass importance="):
        attach_penalties(opt, [EWC(1.0)], Reference.of(net))
    with pytest.raises(ValueError, match="the data is empty"):
        fisher(net, [], task="classification")
    with pytest.raises(ValueError, match="kind must be"):
        fisher(net, [], task="classification", kind="false")
    with pytest.raises(ValueError, match="needs class predictions, not 'regression'"):
        fisher(net, [], task="regression")
    with pytest.raises(ValueError, match="samples must be at least 1"):
        fisher(net, [], task="classification", samples=0)
    bad = [(torch.full((2, 6), math.nan), torch.tensor([0, 1]))]
    with pytest.raises(ValueError, match="the importance is not finite"):
        fisher(net, bad, task="classification", kind="empirical")
