"""Small problems to optimize, the same in every dtype."""

import torch
from torch import nn

PATHS = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True, "fused": False},
    "fused": {"foreach": False, "fused": True},
}


class Net(nn.Module):
    """A body that has been pretrained and a head that has not."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 7), nn.Tanh())
        self.head = nn.Linear(7, 3)

    def forward(self, x):
        return self.head(self.body(x))


def make_net(dtype=torch.float64, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net().to(dtype)


def batch(t, dtype=torch.float64):
    """The t-th batch: inputs and targets, drawn in float64 so that every dtype sees the same."""
    generator = torch.Generator().manual_seed(1000 + t)
    x = torch.randn(16, 6, generator=generator, dtype=torch.float64)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin(), x.sum(1).tanh()], 1)
    return x.to(dtype), y.to(dtype)


def backward(net, t):
    """Gradients of the t-th batch's loss, left in .grad."""
    dtype = next(net.parameters()).dtype
    x, y = batch(t, dtype)
    net.zero_grad()
    loss = (net(x) - y).square().mean()
    loss.backward()
    return loss.detach()


def far(net_a, net_b):
    """Euclidean distance between two networks' weights, in float64."""
    pairs = zip(net_a.parameters(), net_b.parameters(), strict=True)
    return sum((a.double() - b.double()).square().sum() for a, b in pairs).sqrt().item()
