"""Datasets of the sizes that training scripts expect, with few images, drawn from a seed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from . import transforms

__all__ = ["CIFAR10", "MNIST", "FakeData", "FashionMNIST", "ImageFolder"]


class _Drawn(Dataset[tuple[Tensor, int]]):
    """Images and their classes: an image of class k is brighter in its k-th rows."""

    shape: tuple[int, ...] = (1, 28, 28)
    classes: Any = tuple(map(str, range(10)))
    most = 330

    def __init__(self, *_: Any, train: bool = True, **__: Any) -> None:
        draw = torch.Generator().manual_seed(int(train))
        count = self.most if train else self.most // 3
        self.targets = torch.randint(len(self.classes), (count,), generator=draw)
        self.images = torch.rand(count, *self.shape, generator=draw) / 2
        for image, target in zip(self.images, self.targets.tolist(), strict=True):
            image[:, 2 * target : 2 * target + 4] += 0.5
        self.class_to_idx = {name: i for i, name in enumerate(self.classes)}

    @property
    def data(self) -> Tensor:
        """All images as bytes."""
        return (self.images.squeeze(1) * 255).byte()

    train_data, test_data = data, data

    @property
    def train_labels(self) -> Tensor:
        return self.targets

    test_labels = train_labels

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.targets[index])


class MNIST(_Drawn):
    def __init__(self, *_: Any, train: bool = True, transform: Any = None, **__: Any) -> None:
        self.shape = (1, *transforms.size_of(transform, (28, 28)))
        super().__init__(train=train)


class FashionMNIST(_Drawn): ...


class CIFAR10(_Drawn):
    shape = (3, 32, 32)


class ImageFolder(_Drawn):
    shape = (3, 64, 64)


class FakeData(_Drawn):
    def __init__(self, size: int = 330, image_size: tuple[int, ...] = (3, 224, 224), *_: Any, **__: Any) -> None:
        self.shape, self.most = image_size, min(size, self.most)
        super().__init__()
