"""Penalties in hosts, and in whatever calls a step."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from holdfast import L2SP, SFA, RecAdam, Reference
from holdfast.optim import attach_penalties
from methods.problems import PATHS, backward, batch, far, make_net
from methods.test_penalties_resume import SETS, make, train


class TestWhateverCallsTheStep:
    @pytest.mark.parametrize("penalties", SETS)
    @pytest.mark.parametrize("keyword", [False, True])
    def test_a_closure(self, penalties, keyword):
        net, opt, _ = make(penalties=penalties)
        other, plain, attached = make(penalties=penalties)

        def closure():
            opt.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            return loss

        for t in range(10):
            x, y = batch(t, torch.float32)
            loss = opt.step(closure=closure) if keyword else opt.step(closure)
            assert loss == backward(other, t)
            plain.step()
        assert far(net, other) == 0.0
        assert attached.updates == 10

    @pytest.mark.parametrize("path", [pytest.param("single", marks=pytest.mark.soak), "foreach"])
    @pytest.mark.parametrize("penalties", SETS)
    @pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
    def test_a_compiled_step(self, path, penalties):
        torch._dynamo.reset()
        graphs = []

        def count(graph, _):
            graphs.append(graph)
            return graph

        net, opt, _ = make(penalties=penalties, **PATHS[path])
        other, plain, _ = make(penalties=penalties, **PATHS[path])
        step = torch.compile(opt.step, backend=count)
        for t in range(12):
            backward(net, t)
            step()
        train(other, plain, 0, 12)
        assert far(net, other) < 1e-5
        assert len(graphs) < 8
        torch._dynamo.reset()

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_classes_whose_hooks_torch_took_away(self, when):
        """As releases of torch do to their own optimizers when anything is compiled."""

        class Victim(torch.optim.SGD):
            def step(self, closure=None):
                return super().step.__wrapped__(self, closure)

        def take_away():
            Victim.step = getattr(Victim.step, "__wrapped__", Victim.step)
            Victim.step.hooked = True

        Victim([torch.nn.Parameter(torch.ones(1))])
        if when == "before":
            take_away()
        net, opt, attached = make(Victim)
        if when == "after":
            take_away()
        other, plain, _ = make(torch.optim.SGD)
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 100)
        for t in range(3):
            backward(net, t)
            opt.step()
            scheduler.step()
        train(other, plain, 0, 3)
        assert attached.updates == 3
        assert far(net, other) == 0.0

    def test_schedulers_made_before_and_after(self):
        distances = []
        for before in (True, False):
            net = make_net()
            opt = torch.optim.SGD(net.named_parameters(), lr=0.1)
            if before:
                scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
            attached = attach_penalties(opt, [L2SP(5.0)], Reference.of(net))
            if not before:
                scheduler = torch.optim.lr_scheduler.StepLR(opt, 2)
            for t in range(5):
                backward(net, t)
                opt.step()
                scheduler.step()
            assert attached.updates == 5
            distances.append(far(net, make_net()))
        assert distances[0] == distances[1]


class TestHosts:
    @pytest.mark.parametrize("flat", [False, True])
    @pytest.mark.parametrize("cls", [torch.optim.AdamW, RecAdam])
    @pytest.mark.parametrize("penalties", SETS)
    def test_distributed_checkpoints(self, flat, cls, penalties):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        net, opt, _ = make(cls, penalties, groups=True)
        train(net, opt, 0, 5)
        saved = copy.deepcopy(get_optimizer_state_dict(net, opt, options=options))
        other, again, attached = make(cls, penalties, groups=True)
        other.load_state_dict(net.state_dict())
        # Which makes the state by a step with lr 0 and zero gradients, here away from θ*.
        set_optimizer_state_dict(other, again, saved, options=options)
        assert attached.updates == 5
        train(net, opt, 5, 10)
        train(other, again, 5, 10)
        assert far(net, other) == 0.0

    def test_making_state_is_no_update(self):
        net, opt, attached = make(penalties=[L2SP(coupled=True), SFA(every=0.05)])
        with torch.no_grad():
            net.head.bias.add_(1.0)
        before = copy.deepcopy(net)
        get_optimizer_state_dict(net, opt)
        assert attached.updates == 0
        assert far(net, before) == 0.0
        assert all(float(s["exp_avg"].abs().sum()) == 0 for s in opt.state.values())

    @pytest.mark.parametrize("penalties", SETS)
    def test_accelerate(self, penalties, tmp_path):
        accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")
        other, plain, _ = make(penalties=penalties)
        train(other, plain, 0, 8)
        net, opt, attached = make(penalties=penalties)
        accelerator = accelerate.Accelerator(cpu=True)
        net, opt = accelerator.prepare(net, opt)
        train(net, opt, 0, 5)
        accelerator.save_state(str(tmp_path))
        train(net, opt, 5, 7)
        accelerator.load_state(str(tmp_path))
        assert attached.updates == 5
        train(net, opt, 5, 8)
        assert far(net, other) == 0.0
