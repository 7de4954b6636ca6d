"""Whom RecAdam pulls where, and what it refuses."""

import copy
import math

import pytest
import torch

from holdfast import RecAdam, Reference
from holdfast.anneal import Constant, Sigmoid
from methods.problems import backward, far, make_net


def step(opt, net, n=1):
    for t in range(n):
        backward(net, t)
        opt.step()


def same_run(net_a, opt_a, net_b, opt_b):
    step(opt_a, net_a, 5)
    step(opt_b, net_b, 5)
    return far(net_a, net_b) == 0.0


@pytest.fixture
def net():
    return make_net()


OPTIONS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.1, 10)}


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_names_of_wrapped_models(net, wrapper):
    names = [(wrapper + n, p) for n, p in net.named_parameters()]
    opt = RecAdam(names, anchors=dict(Reference.of(net)), **OPTIONS)
    other = make_net()
    assert same_run(net, opt, other, RecAdam(other.parameters(), **OPTIONS))


def test_a_base_model_checkpoint_anchors_the_body_and_frees_the_head(net):
    base = {n.removeprefix("body."): t for n, t in Reference.of(net).items() if "body" in n}
    with pytest.warns(UserWarning, match=r"2 parameters have no anchor .*: head\.weight"):
        opt = RecAdam(net.named_parameters(), anchors=base, **OPTIONS)
    other = make_net()
    groups = [
        {"params": list(other.body.parameters())},
        {"params": list(other.head.parameters()), "anchored": False},
    ]
    assert same_run(net, opt, other, RecAdam(groups, **OPTIONS))


def test_a_reference_of_the_live_model_needs_no_names(net):
    reference = Reference.of(net)
    with torch.no_grad():
        net.body[0].weight.add_(1.0)  # away from its anchor
    opt = RecAdam([{"params": list(net.parameters())}], anchors=reference, **OPTIONS)
    assert opt.distance() == pytest.approx(math.sqrt(54))


def test_a_group_may_be_all_new(net):
    named = list(net.named_parameters())
    body = Reference({n: t for n, t in Reference.of(net).items() if n.startswith("body")})
    groups = [{"params": named[:4]}, {"params": named[4:], "anchored": False, "lr": 0.1}]
    opt = RecAdam(groups, anchors=body, **OPTIONS)
    assert opt.param_groups[1]["lr"] == 0.1
    step(opt, net)
    assert opt.recall_state(group=1)["lam"] == 1.0
    assert opt.recall_state(group=1)["pull"] == 0.0


@pytest.mark.parametrize("how", ["state_dict", "named_parameters"])
def test_anchors_that_are_the_live_tensors_are_copied(net, how):
    live = net.state_dict() if how == "state_dict" else dict(net.named_parameters())
    opt = RecAdam(net.named_parameters(), anchors=live, **OPTIONS)
    step(opt, net, 3)
    assert opt.distance() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_anchors_keep_their_own_dtype(dtype):
    net = make_net(torch.float32)
    anchors = {n: t.to(dtype) for n, t in Reference.of(net).items()}
    opt = RecAdam(net.named_parameters(), anchors=anchors, **OPTIONS)
    assert all(a.dtype == dtype for a in opt._anchors.values[0])
    step(opt, net, 3)
    exact = make_net(torch.float32)
    rounded = {n: t.float() for n, t in anchors.items()}
    step(RecAdam(exact.named_parameters(), anchors=rounded, **OPTIONS), exact, 3)
    assert far(net, exact) == 0.0


def test_memory_mapped_anchors(net, tmp_path):
    Reference.of(net).save(tmp_path / "model.safetensors")
    opt = RecAdam(net.named_parameters(), anchors=Reference.open(tmp_path), **OPTIONS)
    other = make_net()
    assert same_run(net, opt, other, RecAdam(other.parameters(), **OPTIONS))
    assert Reference.open(tmp_path).fingerprint() == Reference.of(make_net()).fingerprint()


def test_identity_goes_before_names(net):
    reference = Reference.of(net)
    swapped = list(net.named_parameters())
    swapped[1], swapped[3] = ("body.2.bias", swapped[1][1]), ("body.0.bias", swapped[3][1])
    opt = RecAdam(swapped, anchors=reference)
    assert opt.distance() == 0.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own
def test_a_compiled_model(net):
    compiled = torch.compile(net)
    reference = Reference.of(compiled)
    assert next(iter(reference)).startswith("_orig_mod.")
    with torch.no_grad():
        net.head.bias.add_(1.0)
    for params in (net.named_parameters(), compiled.named_parameters(), net.parameters()):
        assert RecAdam(params, anchors=reference).distance() == pytest.approx(math.sqrt(3))
    by_name = Reference(dict(reference))
    assert RecAdam(net.named_parameters(), anchors=by_name).distance() == pytest.approx(
        math.sqrt(3)
    )


def test_files_bound_to_a_model_need_no_names(net, tmp_path):
    Reference.of(net).save(tmp_path / "model.safetensors")
    with torch.no_grad():
        net.head.bias.add_(1.0)
    bound = Reference.open(tmp_path).bind(net)
    assert RecAdam(net.parameters(), anchors=bound).distance() == pytest.approx(math.sqrt(3))
    with pytest.raises(ValueError, match="Conv2d shares no parameter name"):
        Reference({"w": torch.zeros(1)}).bind(torch.nn.Conv2d(1, 1, 1))


def test_parts_without_pretrained_weights_can_be_left_out(net):
    assert [n for n in Reference.of(net, without=["head"]) if "head" in n] == []
    with pytest.raises(ValueError, match="'hea' is not a part of the model; did you mean 'head'"):
        Reference.of(net, without="hea")


def test_free_parameters_are_listed_once(net):
    named = list(net.named_parameters())
    with pytest.warns(UserWarning, match=r"1 parameters have no anchor .*: head\.weight") as seen:
        opt = RecAdam([*named[:2], named[4]], anchors=Reference.of(net, without="head"))
        opt.add_param_group({"params": named[2:4]})
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert opt.recall_state(group=1)["lam"] < 1
    with pytest.warns(UserWarning, match=r"1 parameters have no anchor .*: head\.bias"):
        opt.add_param_group({"params": named[5:]})
    assert opt.recall_state(group=2) == {"updates": 0, "lam": 1.0, "pull": 0.0}


def test_names_are_told_where_a_reference_knows_them(net):
    anchors = Reference.of(net, without="head")
    with pytest.warns(UserWarning, match=r": head\.weight, head\.bias"):
        RecAdam(net.parameters(), anchors=anchors)


def test_the_head_of_another_task_in_the_files(net, tmp_path):
    other = {**Reference.of(net), "head.weight": torch.zeros(9, 7), "head.bias": torch.zeros(9)}
    Reference(other).save(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"wrong shape.* leave it out: Reference\.open"):
        RecAdam(net.named_parameters(), anchors=Reference.open(tmp_path))
    with pytest.warns(UserWarning, match=r"head\.weight, head\.bias"):
        RecAdam(net.named_parameters(), anchors=Reference.open(tmp_path, without="head"))


def test_late_groups_go_on_with_the_recall(net):
    named = list(net.named_parameters())
    opt = RecAdam(named[:2], **OPTIONS)
    step(opt, net, 8)
    opt.add_param_group({"params": named[2:4], "gamma": 5.0})
    assert opt.param_groups[1]["updates"] is opt.param_groups[0]["updates"]
    step(opt, net)
    assert opt.recall_state(group=1)["lam"] == Sigmoid(0.1, 10)(9)
    assert opt.state[named[2][1]]["step"] == 1


def test_late_groups_find_their_anchors_by_the_models_prefix(net):
    base = {n.removeprefix("body."): t for n, t in Reference.of(net).items() if "body" in n}
    named = list(net.named_parameters())
    opt = RecAdam(named[:2], anchors=base, **OPTIONS)
    opt.add_param_group({"params": named[2:4]})
    assert torch.equal(opt._anchors.values[1][0], named[2][1])


class TestRefused:
    def test_no_anchor_at_all(self, net):
        with pytest.raises(ValueError, match=r"Parameters: body\.0\.weight.* Anchors: foreign"):
            RecAdam(net.named_parameters(), anchors={"foreign": torch.zeros(2)})

    def test_wrong_shapes(self, net):
        anchors = {**Reference.of(net), "head.bias": torch.zeros(4)}
        with pytest.raises(ValueError, match=r"head\.bias is \(3,\), its anchor \(4,\)"):
            RecAdam(net.named_parameters(), anchors=anchors)

    def test_a_mapping_without_names(self, net):
        with pytest.raises(ValueError, match=r"pass model\.named_parameters\(\)"):
            RecAdam(net.parameters(), anchors=dict(Reference.of(net)))

    def test_a_reference_of_another_live_model_without_names(self, net):
        other = make_net()
        with pytest.raises(ValueError, match="no parameter has an anchor"):
            RecAdam(net.parameters(), anchors=Reference.of(other))

    def test_duplicate_names(self, net):
        a, b = list(net.parameters())[:2]
        with pytest.raises(ValueError, match="duplicate parameter names: w"):
            RecAdam([("w", a), ("w", b)])
        with pytest.raises(ValueError, match="duplicate parameter names: w"):
            RecAdam([{"params": [("w", a)]}, {"params": [("w", b)]}])

    @pytest.mark.parametrize("anchors", [[torch.zeros(1)], "model", 3])
    def test_anchors_of_another_type(self, net, anchors):
        with pytest.raises(TypeError, match="anchors must be a Reference"):
            RecAdam(net.named_parameters(), anchors=anchors)

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
    @pytest.mark.parametrize("name", ["lr", "gamma", "eps", "weight_decay"])
    def test_numbers(self, net, name, bad):
        with pytest.raises(ValueError, match=f"{name} must be a finite number ≥ 0, got {bad}"):
            RecAdam(net.parameters(), **{name: bad})
        with pytest.raises(ValueError, match=f"{name} must be a finite number"):
            RecAdam([{"params": list(net.parameters()), name: bad}])

    @pytest.mark.parametrize(
        "betas", [(1.0, 0.9), (0.9, -0.1), (0.9,), (math.nan, 0.9), 0.9, (".9", ".99")]
    )
    def test_betas(self, net, betas):
        with pytest.raises(ValueError, match="betas must be two numbers"):
            RecAdam(net.parameters(), betas=betas)

    def test_the_model_itself(self, net):
        with pytest.raises(TypeError, match=r"pass the parameters, model\.named_parameters\(\)"):
            RecAdam(net)
        with pytest.raises(TypeError, match="needs a model, got OrderedDict"):
            Reference.of(net.state_dict())
        with pytest.raises(TypeError, match=r"for a model use Reference\.of\(model\)"):
            Reference(net)

    def test_other_options(self, net):
        with pytest.raises(TypeError, match="anneal must be an annealing"):
            RecAdam(net.parameters(), anneal="sigmoid")
        with pytest.raises(TypeError, match="anchored must be True or False, got 'no'"):
            RecAdam([{"params": list(net.parameters()), "anchored": "no"}])
        with pytest.raises(ValueError, match="group must be from 0 to 0, got 5"):
            RecAdam(net.parameters()).recall_state(group=5)
        with pytest.raises(ValueError, match="excludes all weights"):
            Reference.of(net, without=["body", "head"])
        with pytest.raises(ValueError, match="cannot both be True"):
            RecAdam(net.parameters(), foreach=True, fused=True)
        for dtype in (torch.int32, torch.float8_e4m3fn):
            with pytest.raises(ValueError, match="state_dtype must be None, '8bit' or one of"):
                RecAdam(net.parameters(), state_dtype=dtype)
        for bad in ("1e-3", None, True, torch.zeros(2)):
            with pytest.raises(TypeError, match="gamma must be a number"):
                RecAdam(net.parameters(), gamma=bad)
        with pytest.raises(ValueError, match="empty parameter list"):
            RecAdam([])
        with pytest.raises(ValueError, match="lr as a tensor needs capturable"):
            RecAdam(net.parameters(), lr=torch.tensor(1e-3), foreach=True)

    def test_complex_parameters(self):
        with pytest.raises(ValueError, match=r"real floating-point .* got torch\.complex64"):
            RecAdam([torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))])

    def test_sparse_gradients_change_nothing(self):
        dense = torch.nn.Parameter(torch.ones(2))
        table = torch.nn.Embedding(5, 2, sparse=True)
        opt = RecAdam([dense, table.weight])
        before = table.weight.detach().clone()
        table(torch.tensor([1])).sum().backward()
        dense.grad = torch.ones(2)
        with pytest.raises(RuntimeError, match="sparse"):
            opt.step()
        assert torch.equal(dense, torch.ones(2))
        assert torch.equal(table.weight, before)
        assert opt.recall_state()["updates"] == 0

    def test_a_refused_group_leaves_the_optimizer_as_it_was(self, net):
        named = list(net.named_parameters())
        opt = RecAdam(named[:2], anchors=Reference.of(net), **OPTIONS)
        before = copy.deepcopy(opt.state_dict())
        for bad in (
            {"params": named[2:], "gamma": -1.0},
            {"params": [("body.0.weight", named[2][1])]},
            {"params": [("body.2.weight", torch.nn.Parameter(torch.zeros(2)))]},
        ):
            with pytest.raises(ValueError, match=r"gamma|duplicate|wrong shape"):
                opt.add_param_group(bad)
            assert opt.state_dict() == before
        step(opt, net)


def test_lr_gamma_above_one_warns_once(net):
    groups = [{"params": [p]} for p in net.parameters()]
    with pytest.warns(UserWarning, match="above 1") as seen:
        opt = RecAdam(groups, lr=1e-3)
    assert len(seen) == 1
    step(opt, net, 3)
    opt.load_state_dict(opt.state_dict())


def test_a_late_group_with_a_fast_pull_warns_too(net):
    named = list(net.named_parameters())
    opt = RecAdam(named[:2])
    with pytest.warns(UserWarning, match="above 1"):
        opt.add_param_group({"params": named[2:], "lr": 1e-2})
    RecAdam(net.parameters(), lr=1e-2, anneal=Constant(1.0))  # pulls nowhere: nothing to warn of


@pytest.mark.parametrize("foreach", [False, True])
def test_a_nan_gradient_behaves_as_in_adamw(foreach):
    values = []
    for cls, extra in ((RecAdam, {"gamma": 1.0}), (torch.optim.AdamW, {"weight_decay": 0.0})):
        p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
        opt = cls([p, q], lr=1e-3, foreach=foreach, **extra)
        p.grad, q.grad = torch.tensor([1.0, math.nan, 1.0]), torch.ones(3)
        opt.step()
        values.append((p.isnan().tolist(), q.isnan().tolist()))
    assert values[0] == values[1] == ([False, True, False], [False] * 3)
