"""Train a small ResNet on images that are cut in tiles, one for each rank.

    torchrun --nproc-per-node 4 examples/train_resnet.py --mesh sy=2,sx=2 --collectives

The images are stripes under noise; the network tells in which direction they run. `--collectives` shows the edges of
the tiles that convolutions exchange (halos), the statistics of BatchNorm, and the sums of gradients: no activation is
gathered. A layer whose tiles are so small that most of them would be halo is refused by the layout `spatial`, so the
images are large.
"""

from __future__ import annotations

import argparse
from math import pi

import torch
from resnet import resnet
from training import device_here, finish, parser, report

import autopar


def main() -> None:
    options = parse()
    torch.manual_seed(0)  # every process makes the same model and draws the same batches
    device = device_here()
    sizes = {"width": options.width, "image": options.image, "classes": options.classes, "batch": options.batch}
    model, inputs = resnet(depth=10, loss=True, train=True, device=str(device), **sizes)
    parallel = autopar.parallelize(model, options.mesh, inputs, layout=options.layout)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=options.lr)
    for step in range(options.steps):
        images, labels = stripes(options.batch, options.image, options.classes)
        optimizer.zero_grad()
        loss = parallel(images=images.to(device), labels=labels.to(device))
        loss.backward()
        optimizer.step()
        report(options, step, loss)
    finish(options, parallel)


def stripes(batch: int, image: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stripes 16 pixels apart, each image's in the direction of its class; colour by colour noise as strong as they."""
    labels = torch.randint(classes, (batch,))
    angle = (labels * pi / classes).reshape(-1, 1, 1)
    phase = 2 * pi * torch.rand(batch, 1, 1)
    place = torch.arange(image) * 2 * pi / 16
    waves = torch.sin(angle.cos() * place.reshape(-1, 1) + angle.sin() * place + phase)
    return waves.unsqueeze(1) + torch.randn(batch, 3, image, image), labels


def parse() -> argparse.Namespace:
    found = parser(__doc__, layout="spatial", steps=40, batch=8, lr=1e-2)
    found.add_argument("--image", type=int, default=256)
    found.add_argument("--width", type=int, default=4)
    found.add_argument("--classes", type=int, default=4)
    return found.parse_args()


if __name__ == "__main__":
    main()
