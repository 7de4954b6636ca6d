import torch

from holdfast import Reference
from holdfast.methods.identity import Keep


def test_it_is_the_model_as_it_is():
    net = torch.nn.Linear(2, 1)
    reference = Reference.of(net)
    net.weight.data.add_(1.0)
    end = net.weight.detach().clone()
    assert Keep().merge(net, reference) is net
    assert torch.equal(net.weight, end)
    assert Keep.neutral == {}
    assert not Keep().needs_reference
