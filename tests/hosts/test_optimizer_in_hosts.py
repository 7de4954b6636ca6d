"""RecAdam as a plain optimizer in real hosts: Trainer, Accelerate, distributed checkpoints."""

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from holdfast import RecAdam, Reference
from holdfast.anneal import Sigmoid
from methods.problems import backward, far, make_net

transformers = pytest.importorskip("transformers", reason="the hf extra is not installed")
accelerate = pytest.importorskip("accelerate", reason="the hf extra is not installed")

OPTIONS = {"lr": 1e-2, "gamma": 20.0, "anneal": Sigmoid(0.3, 10)}


class TestDistributedCheckpoint:
    @pytest.mark.parametrize("flat", [False, True])
    def test_round_trip(self, flat):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        net, other = make_net(), make_net()
        opt, again = (RecAdam(n.named_parameters(), **OPTIONS) for n in (net, other))
        for t in range(4):
            backward(net, t)
            opt.step()
        saved = copy.deepcopy(get_optimizer_state_dict(net, opt, options=options))
        other.load_state_dict(net.state_dict())
        set_optimizer_state_dict(other, again, saved, options=options)
        for n, o in ((net, opt), (other, again)):
            for t in range(4, 8):
                backward(n, t)
                o.step()
        assert far(net, other) == 0.0
        assert again.recall_state() == opt.recall_state()

    def test_a_fresh_optimizer_is_left_at_its_beginning(self):
        """torch makes the state by a step with lr 0 and zero gradients."""
        net, other = make_net(), make_net()
        opt, plain = (RecAdam(n.parameters(), **OPTIONS) for n in (net, other))
        get_optimizer_state_dict(net, opt)
        assert len(opt.state) == 6
        for n, o in ((net, opt), (other, plain)):
            for t in range(4):
                backward(n, t)
                o.step()
        assert opt.recall_state()["updates"] == 4
        assert far(net, other) == 0.0

    def test_a_warm_up_from_zero_counts(self):
        net = make_net()
        opt = RecAdam(net.parameters(), **(OPTIONS | {"lr": 0.0}))
        backward(net, 0)
        opt.step()
        assert opt.recall_state()["updates"] == 1


def test_accelerate(tmp_path):
    def run(prepared):
        net = make_net(torch.float32)
        opt = RecAdam(net.parameters(), **OPTIONS)
        for t in range(8):
            if t == 0 and prepared:
                accelerator = accelerate.Accelerator(cpu=True)
                net, opt = accelerator.prepare(net, opt)
            if t == 5 and prepared:
                accelerator.save_state(str(tmp_path))
                for p in net.parameters():
                    p.data.zero_()
                accelerator.load_state(str(tmp_path))
            backward(net, t)
            opt.step()
        return net

    assert far(run(True), run(False)) == 0.0


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, i):
        generator = torch.Generator().manual_seed(i)
        ids = torch.randint(5, 90, (12,), generator=generator)
        return {"input_ids": ids, "labels": ids[0] % 2}


@pytest.mark.parametrize("where", ["live", "files"])
def test_trainer_resumes_to_the_bit(tmp_path, where):
    """The pretrained weights as a Reference; a new head that is drawn anew in each process."""
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        vocab_size=99, hidden_dropout_prob=0.1,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(tmp_path / "pretrained")

    def train(resume):
        model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "pretrained")
        if where == "live":
            anchors = Reference.of(model, without="classifier")
        else:
            anchors = Reference.open(tmp_path / "pretrained").bind(model)
        args = transformers.TrainingArguments(
            output_dir=tmp_path / f"run-{where}", max_steps=12, save_steps=5, use_cpu=True,
            per_device_train_batch_size=4, report_to="none", disable_tqdm=True, seed=1,
        )  # fmt: skip
        optimizer = (RecAdam, OPTIONS | {"anchors": anchors})
        trainer = transformers.Trainer(
            model, args, train_dataset=Rows(), optimizer_cls_and_kwargs=optimizer
        )
        with pytest.warns(UserWarning, match="2 parameters have no anchor"):
            trainer.train(resume_from_checkpoint=resume)
        return model, trainer.optimizer

    whole, optimizer = train(None)
    torch.manual_seed(99)
    resumed, _ = train(str(tmp_path / f"run-{where}" / "checkpoint-5"))
    assert far(whole, resumed) == 0.0
    assert optimizer.optimizer.recall_state()["updates"] == 12
