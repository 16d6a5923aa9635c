"""A ResNet on Fashion-MNIST, as a plain `nn.Module`: `mpirun -n 2 python resnet.py [FOLDER]`.

Where Fashion-MNIST is not installed, scikit-learn's digits take its place.
"""

import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hybridpipe
from hybridpipe.data import digits, fashion_mnist

FASHION = "/usr/share/datasets/fashion-mnist"


class BasicBlock(nn.Module):
    """Two convolutions, added to their input: (B, C, H, W) → (B, width, H / stride, W / stride)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = nn.Conv2d(channels, width, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """He et al. 2016, three stages of `depth` blocks (their section 4.2): (B, 1, H, W) → (B, num_classes)."""

    def __init__(self, width: int = 16, depth: int = 2, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        widths = [width] * depth + [2 * width] * depth + [4 * width] * depth
        before = [width, *widths[:-1]]
        self.blocks = nn.ModuleList(BasicBlock(c, w, w // c) for c, w in zip(before, widths, strict=True))
        self.fc = nn.Linear(4 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        for block in self.blocks:
            x = block(x)
        return self.fc(x.mean((2, 3)))


if __name__ == "__main__":
    folder = sys.argv[1] if len(sys.argv) > 1 else FASHION
    if folder == FASHION and not Path(FASHION).exists():
        folder, train, held_out = "digits", digits(), digits(train=False)
    else:
        train, held_out = fashion_mnist(folder, limit=4096), fashion_mnist(folder, train=False, limit=1024)
    torch.manual_seed(0)
    trainer = hybridpipe.Trainer(
        ResNet(),
        loss=F.cross_entropy,
        optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=1e-4),
        plan="auto",
        minibatch_size=64,
    )
    if trainer.world.rank == 0:
        print(f"training on {folder}")
    trainer.fit(train, epochs=2, validation=held_out)
    trainer.close()
