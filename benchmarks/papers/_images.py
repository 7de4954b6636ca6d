"""Images of tar files: decoded once for all processes, and made into batches on the device."""

from __future__ import annotations

import fcntl
import io
import os
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Dataset

from holdfast.hosts._updates import order_of

SIZE, PAD = 224, 12
#: Images of a class: of ImageNet three of imagenet-val-a.tar, then two of imagenet-val-b.tar.
PER_CLASS = {"imagenet": 5, "train": 20}
Row = tuple[int, bytes]  # a class and a file
#: Of the sets that are asked for: the set of the tars, and the part of each class of it.
Parts = Mapping[str, tuple[str, slice]]


class Images(NamedTuple):
    """Pixels as they are in files, (n, height, width, 3) bytes, and the classes."""

    pixels: Tensor
    labels: Tensor


class Normal:
    """Normalizes a model's inputs, on a device."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], device: torch.device) -> None:
        self.mean, self.std = (255.0 * torch.tensor(x, device=device) for x in (mean, std))

    def __call__(self, pixels: Tensor) -> Tensor:
        """(n, 3, height, width) in float32, channels last in memory."""
        return ((pixels.float() - self.mean) / self.std).permute(0, 3, 1, 2)


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """Images one by one, with their labels, as holdfast scores them."""

    def __init__(self, images: Images) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images.pixels[index], self.images.labels[index]


class Collate:
    """Makes batches of samples."""

    def __init__(self, normal: Normal) -> None:
        self.normal = normal

    def __call__(self, samples: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        pixels, labels = zip(*samples, strict=True)
        return self.normal(torch.stack(pixels)), torch.stack(labels)


def training_batches(
    images: Images, normal: Normal, size: int, epochs: int, seed: int, **columns: Tensor
) -> Iterator[dict[str, Tensor]]:
    """Batches of one size, of images cropped at random and flipped every second time.

    Nothing waits for the device. Columns have a value an image and are handed on.
    """
    device, count = images.pixels.device, len(images.labels)
    generator = torch.Generator().manual_seed(seed)
    places = torch.arange(SIZE, device=device)
    for epoch in range(epochs):
        order = order_of(epoch, count, seed).to(device)
        corners = torch.randint(-PAD, PAD + 1, (2, count, 1), generator=generator).to(device)
        flipped = (torch.rand(count, 1, generator=generator) < 0.5).to(device)
        for number in range(count // size):
            part = slice(number * size, (number + 1) * size)
            chosen = order[part]
            rows, across = (_reflected(corner[part] + places) for corner in corners)
            across = torch.where(flipped[part], across.flip(1), across)
            pixels = images.pixels[chosen[:, None, None], rows[:, :, None], across[:, None]]
            batch = {"x": normal(pixels), "labels": images.labels[chosen]}
            yield batch | {name: values[chosen] for name, values in columns.items()}


def _reflected(places: Tensor) -> Tensor:
    """Places beyond an edge, as far within."""
    last = SIZE - 1
    return last - (last - places.abs()).abs()


@torch.no_grad()
def predicted(
    model: nn.Module, normal: Normal, images: Images, autocast: torch.dtype | None = None
) -> Tensor:
    """A model's logits, in float32."""
    with torch.autocast(images.pixels.device.type, autocast, enabled=autocast is not None):
        return torch.cat([model(normal(pixels)) for pixels in images.pixels.split(250)]).float()


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """In percent."""
    return round(100.0 * (logits.argmax(1) == labels).double().mean().item(), 3)


def read_images(
    file: Path, flowers: Path, imagenet: Sequence[Path], parts: Parts, device: torch.device,
    limit: int | None,
) -> dict[str, Images]:  # fmt: skip
    """Parts of the sets ``train`` and ``test`` of Flowers102 and ``imagenet``, on the device.

    Args:
        file: where they are kept once they are decoded; other processes wait until they are.
        flowers: a tar of ``train/class/image.jpg`` and ``test/…``.
        imagenet: tars of ``class/image.jpg``, read in the order of their names.
        parts: what is wanted.
        device: where to.
        limit: take so many images of each set, evenly from all.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with open(file.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given up when the process ends, however it ends
        if not file.exists():
            _decode(file, flowers, imagenet, parts, limit)
    found = load_file(file, device=str(device))
    return {name: Images(found[f"{name}.pixels"], found[f"{name}.labels"]) for name in parts}


def chosen(rows: Mapping[str, Sequence[Row]], parts: Parts) -> dict[str, list[Row]]:
    """Parts of the sets, which have some images of each class, in the order of the tars."""
    found = {}
    for name, (of, part) in parts.items():
        classes: dict[int, list[Row]] = {}
        for row in rows[of]:
            classes.setdefault(row[0], []).append(row)
        counts = {len(some) for some in classes.values()}
        if of in PER_CLASS and counts != {PER_CLASS[of]}:
            raise ValueError(
                f"a class of {of} must have {PER_CLASS[of]} images, but the tars have "
                f"{', '.join(map(str, sorted(counts)))}: pass flowers102.tar as --flowers, and "
                "imagenet-val-a.tar and imagenet-val-b.tar as --imagenet"
            )
        found[name] = [row for some in classes.values() for row in some[part]]
    return found


def _decode(
    file: Path, flowers: Path, imagenet: Sequence[Path], parts: Parts, limit: int | None
) -> None:
    rows: dict[str, list[Row]] = {"train": [], "test": [], "imagenet": []}
    for tar in (flowers, *sorted(imagenet, key=lambda tar: tar.name)):
        for name, data in _members(tar):
            *above, label, _ = name.split("/")
            if above:
                rows[above[-1]].append((int(label) - 1, data))  # flowers count from 1
            else:
                rows["imagenet"].append((int(label), data))
    tensors: dict[str, Tensor] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, found in chosen(rows, parts).items():
            found = found[:: max(1, len(found) // limit)][:limit] if limit else found
            pixels = list(pool.map(_pixels, (data for _, data in found), chunksize=32))
            tensors[f"{name}.pixels"] = torch.from_numpy(np.stack(pixels))
            tensors[f"{name}.labels"] = torch.tensor([label for label, _ in found])
    unfinished = file.with_suffix(".part")
    save_file(tensors, unfinished)
    unfinished.rename(file)


def _members(tar: Path) -> Iterator[tuple[str, bytes]]:
    with tarfile.open(tar) as opened:
        for member in opened:
            data = opened.extractfile(member)
            if data is not None:
                yield member.name, data.read()


def _pixels(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
