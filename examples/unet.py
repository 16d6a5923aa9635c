"""A U-Net takes the noise from handwritten digits, as a plain `nn.Module`: `mpirun -n 2 python unet.py`.

Its skip connections lead from the first blocks to the last ones: a stage receives all that it needs.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import hybridpipe
from hybridpipe.data import digits


class UNet(nn.Module):
    """Ronneberger et al. 2015 with two levels: images (B, 1, H, W) → images; H and W are divisible by 4."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down1, self.down2 = block(1, width), block(width, 2 * width)
        self.bottom = block(2 * width, 4 * width)
        self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
        self.merge2 = block(4 * width, 2 * width)
        self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.merge1 = block(2 * width, width)
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(F.avg_pool2d(skip1, 2))
        y = self.bottom(F.avg_pool2d(skip2, 2))
        y = self.merge2(torch.cat([skip2, self.up2(y)], dim=1))
        y = self.merge1(torch.cat([skip1, self.up1(y)], dim=1))
        return x + self.head(y)


def block(channels: int, width: int) -> nn.Sequential:
    """Return two convolutions, each with normalisation and activation."""
    return nn.Sequential(
        *(nn.Conv2d(channels, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU()),
        *(nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(4, width), nn.GELU()),
    )


class NoisyDigits(Dataset[tuple[Tensor, Tensor]]):
    """Pairs of a digit with noise and without, float32 (1, 8, 8); the noise is the same on every rank."""

    def __init__(self, train: bool = True, noise: float = 0.7) -> None:
        self.clean, self.noise = digits(train).tensors[0], noise

    def __len__(self) -> int:
        return len(self.clean)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.clean[index]
        return image + self.noise * torch.randn_like(image), image


if __name__ == "__main__":
    torch.manual_seed(0)
    adam = partial(torch.optim.Adam, lr=0.002)
    trainer = hybridpipe.Trainer(UNet(), loss=F.mse_loss, optimizer=adam, plan="auto", minibatch_size=64)
    trainer.fit(NoisyDigits(), epochs=3, validation=NoisyDigits(train=False))
    trainer.close()
