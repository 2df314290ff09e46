"""A residual network with BatchNorm (He et al., 2015) for images.

`resnet()` is small; `resnet(depth=50, width=64, image=224, classes=1000)` is the well-known one.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BLOCKS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


class ConvNorm(nn.Sequential):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1) -> None:
        convolution = nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False)
        super().__init__(convolution, nn.BatchNorm2d(outputs))


class Block(nn.Module):
    """Two 3x3 convolutions, or, as a bottleneck, a 3x3 between two 1x1; around them a shortcut."""

    def __init__(self, inputs: int, channels: int, outputs: int, stride: int) -> None:
        super().__init__()
        if outputs == channels:
            layers = [ConvNorm(inputs, channels, 3, stride), nn.ReLU(), ConvNorm(channels, outputs, 3)]
        else:
            layers = [ConvNorm(inputs, channels, 1), nn.ReLU(), ConvNorm(channels, channels, 3, stride)]
            layers += [nn.ReLU(), ConvNorm(channels, outputs, 1)]
        self.body = nn.Sequential(*layers)
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self, depth: int, width: int, classes: int) -> None:
        super().__init__()
        expansion = 4 if depth >= 50 else 1
        self.stem = nn.Sequential(ConvNorm(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1))
        blocks: list[nn.Module] = []
        inputs = width
        for stage, repeats in enumerate(BLOCKS[depth]):
            channels = width * 2**stage
            for repeat in range(repeats):
                stride = 2 if stage > 0 and repeat == 0 else 1
                blocks.append(Block(inputs, channels, channels * expansion, stride))
                inputs = channels * expansion
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def forward(self, images: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        """The class scores, or the loss when the labels are given."""
        features = functional.adaptive_avg_pool2d(self.blocks(self.stem(images)), 1).flatten(1)
        scores = self.head(features)
        return scores if labels is None else functional.cross_entropy(scores, labels)


def resnet(
    depth: int = 18,
    width: int = 8,
    image: int = 64,
    classes: int = 10,
    batch: int = 6,
    loss: bool = False,
    train: bool = False,
    device: str = "cpu",
) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """The model and its inputs; with `train`, BatchNorm uses the batch and updates its statistics."""
    with torch.device(device):
        model = ResNet(depth, width, classes).train(train)
        images, labels = torch.randn(batch, 3, image, image), torch.randint(classes, (batch,))
    return model, {"images": images, "labels": labels} if loss else {"images": images}
