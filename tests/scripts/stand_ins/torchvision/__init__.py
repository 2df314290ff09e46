"""What training scripts take from torchvision, with drawn images in place of downloaded ones."""

from . import datasets, transforms, utils

__all__ = ["datasets", "transforms", "utils"]
