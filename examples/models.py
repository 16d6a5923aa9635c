"""Networks of the example configurations, each an `nn.Sequential`.

A plan may cut between direct children. So each child is one block: a convolution or a dense
layer with its activation, pooling and dropout. Arguments are plain numbers, which a TOML file
can hold. Initial weights come from torch's global generator.
"""

from collections import OrderedDict
from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

# VGG-11, "configuration A": Simonyan & Zisserman 2015, table 1. Numbers are channels of 3×3
# convolutions, "pool" halves height and width.
VGG11 = (64, "pool", 128, "pool", 256, 256, "pool", 512, 512, "pool", 512, 512, "pool")


def mlp(width: int = 512, depth: int = 4) -> nn.Sequential:
    """Build a multilayer perceptron with `depth` hidden layers: (B, 1, 8, 8) → (B, 10)."""
    widths = [64] + [width] * depth
    return _initialised(nn.Flatten(), *_dense_blocks(widths, nn.GELU, 0.0), nn.Linear(width, 10))


def vgg_digits(channels: int = 32, width: int = 1024, dropout: float = 0.5) -> nn.Sequential:
    """Build a VGG-style network for 8×8 digits: (B, 1, 8, 8) → (B, 10).

    Four convolutions compute most and have few parameters, two dense layers have most of them.
    For this shape PipeDream replicates the first stage and not the last.

    GELU and average pooling, where VGG has ReLU and maxima, keep the network smooth. Another
    order of summation changes the last bit of a float32. At the kink of a ReLU that bit can
    switch a whole gradient: after ten epochs two plans would differ in the third digit of the
    loss instead of the seventh.
    """
    layout = (channels, channels, "pool", 2 * channels, 2 * channels, "pool")
    features = 2 * channels * 2 * 2
    return _vgg(layout, 1, features, (width, width), 10, dropout, smooth=True)


def vgg_fashion(channels: int = 16, width: int = 512, dropout: float = 0.5) -> nn.Sequential:
    """Build a VGG-style network for 28×28 images: (B, 1, 28, 28) → (B, 10)."""
    layout = (channels, "pool", 2 * channels, "pool", 4 * channels, 4 * channels, "pool")
    return _vgg(layout, 1, 4 * channels * 3 * 3, (width, width), 10, dropout)


def vgg11(
    num_classes: int = 10, in_channels: int = 3, padding: int = 0, dropout: float = 0.5
) -> nn.Sequential:
    """Build VGG-11 for 32×32 images: (B, in_channels, 32 − 2·padding, …) → (B, num_classes).

    The convolutions are those of the paper. Its five poolings reduce 32×32 to 1×1, where they
    reduce 224×224 to 7×7. So the first dense layer has 512 inputs instead of 25088; the other
    dense layers keep their 4096. 28×28 images need `padding=2`, zeros on each side.
    """
    return _vgg(VGG11, in_channels, 512, (4096, 4096), num_classes, dropout, padding)


def gpt(
    vocabulary: int = 96,
    block_size: int = 64,
    num_layers: int = 4,
    num_heads: int = 4,
    width: int = 128,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Build a small GPT: int64 tokens (B, T ≤ block_size) → logits (B, T, vocabulary).

    The head has weights of its own.
    """
    blocks = {f"block{i}": Block(num_heads, width, dropout) for i in range(1, num_layers + 1)}
    model = nn.Sequential(
        OrderedDict(
            embedding=Embedding(vocabulary, block_size, width, dropout),
            **blocks,
            head=nn.Sequential(nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)),
        )
    )
    nn.init.normal_(model.head[-1].weight, std=0.02)  # the first loss is about log(vocabulary)
    return model


def muon(
    named_parameters: Iterable[tuple[str, Tensor]], lr: float, weight_decay: float = 0.1
) -> list[Optimizer]:
    """Make Muon for the matrices of the blocks, AdamW for embeddings, the head, biases and norms.

    Muon's updates are scaled to the size of AdamW's, so that one rate suits both. A stage may have one kind
    of parameters only.
    """
    inner: list[Tensor] = []
    others: list[Tensor] = []
    for name, p in named_parameters:
        is_inner = p.ndim == 2 and not name.startswith(("embedding.", "head."))
        (inner if is_inner else others).append(p)
    options = {"lr": lr, "weight_decay": weight_decay}
    return [
        *([torch.optim.Muon(inner, adjust_lr_fn="match_rms_adamw", **options)] if inner else []),
        *([torch.optim.AdamW(others, **options)] if others else []),
    ]


class Embedding(nn.Module):
    """Sum of token and position embeddings: int64 (B, T) → float (B, T, width)."""

    def __init__(self, vocabulary: int, block_size: int, width: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(block_size, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.dropout(self.token(tokens) + self.position(positions))


class Block(nn.Module):
    """Causal self-attention and a dense layer with pre-norm: float (B, T, width) → the same shape.

    Each gets its input normalised, and its result is added to the input as it was. The dense layer is four
    times as wide.
    """

    def __init__(self, num_heads: int, width: int, dropout: float) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is not divisible by num_heads {num_heads}")
        self.num_heads = num_heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.dense = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.attend(self.attention_norm(x)), self.dropout, self.training)
        return x + self.dense(x)

    def attend(self, x: Tensor) -> Tensor:
        """Attend from each position to itself and to those before it: (B, T, width) → the same shape."""
        # (B, T, 3·width) → three of (B, heads, T, width / heads)
        query, key, value = (
            self.query_key_value(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        return self.attention_output(attended.transpose(1, 2).flatten(2))


def _vgg(
    layout: Iterable[int | str],
    in_channels: int,
    num_features: int,
    dense: tuple[int, ...],
    num_classes: int,
    dropout: float,
    padding: int = 0,
    smooth: bool = False,
) -> nn.Sequential:
    """Build convolutions by `layout`, dense layers of the widths `dense`, and a classifier."""
    activation, pool = (nn.GELU, nn.AvgPool2d) if smooth else (nn.ReLU, nn.MaxPool2d)
    features: list[nn.Sequential] = []
    for item in layout:
        if item == "pool":  # belongs to the block before it, so that a cut sends the smaller tensor
            features[-1].append(pool(2))
        else:
            convolution = nn.Conv2d(in_channels, int(item), kernel_size=3, padding=1)
            features.append(nn.Sequential(convolution, activation()))
            in_channels = int(item)
    if padding:
        features[0].insert(0, nn.ZeroPad2d(padding))
    features[-1].append(nn.Flatten())
    dense_blocks = _dense_blocks([num_features, *dense], activation, dropout)
    return _initialised(*features, *dense_blocks, nn.Linear(dense[-1], num_classes))


def _dense_blocks(widths: list[int], activation: type[nn.Module], dropout: float) -> list[nn.Sequential]:
    return [
        nn.Sequential(nn.Linear(before, after), activation(), nn.Dropout(dropout))
        for before, after in pairwise(widths)
    ]


def _initialised(*layers: nn.Module) -> nn.Sequential:
    """Chain the layers, with weights drawn for ReLU (He et al. 2015) and biases of zero.

    From torch's default weights, deep VGG networks without batch normalisation hardly learn.
    The last layer, which no ReLU follows, has small weights: the first loss is about log(classes).
    """
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            module.bias.data.zero_()
    model[-1].weight.data.mul_(0.1)
    return model
