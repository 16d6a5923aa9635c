"""Data sets of the examples and the quick start, for a configuration's `[data] factory`.

Not known here: order of the samples and ranks. Invariant: a data set is map-style and held in memory.
"""

import gzip
import importlib.util
import math
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from hybridpipe.errors import REMEDIES

# The idx format: two zero bytes, a byte for the dtype, a byte for the number of dimensions,
# then the dimensions as big-endian uint32, then the values. Every published image set is uint8.
_IDX_UINT8 = 0x08

_FASHION_HELP = "`apt-get install dataset-fashion-mnist` provides it in /usr/share/datasets"


def digits(train: bool = True) -> TensorDataset:
    """Load scikit-learn's handwritten digits: 1437 for training, 360 held out.

    Returns:
        Pairs of a float32 image (1, 8, 8), standardised, and an int64 class in 0..9.

    Raises:
        ModuleNotFoundError: scikit-learn is not installed; the message says how to get it.
    """
    # The file is read without an import: scikit-learn and scipy would take seconds to load, on every rank.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(
            f"the digits need scikit-learn, which is missing: {REMEDIES['scikit-learn']}", name="scikit-learn"
        )
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixels, classes = table[:, :-1], table[:, -1]  # (1797, 64) in 0..16, (1797,)

    # After shuffling and sorting by class every fifth is held out, so each class is split 4 to 1.
    # RandomState's stream will never change; that of numpy's newer generators may.
    shuffled = np.random.RandomState(0).permutation(len(classes))
    by_class = shuffled[np.argsort(classes[shuffled], kind="stable")]
    held_out = np.sort(by_class[::5])
    chosen = np.setdiff1d(by_class, held_out) if train else held_out

    images = (pixels[chosen].reshape(-1, 1, 8, 8) / 16 - 0.305) / 0.376  # training mean, deviation
    return TensorDataset(
        torch.from_numpy(images.astype(np.float32)),
        torch.from_numpy(classes[chosen].astype(np.int64)),
    )


def fashion_mnist(
    root: str = "/usr/share/datasets/fashion-mnist", train: bool = True, limit: int | None = None
) -> TensorDataset:
    """Load Fashion-MNIST: 60000 images for training, 10000 held out.

    Args:
        root: directory of the four idx files, each plain or with `.gz`.
        limit: take the first `limit` samples only; None takes all.

    Returns:
        Pairs of a float32 image (1, 28, 28), standardised, and an int64 class in 0..9.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: a file is no idx file, or not of the expected shape, or `limit` < 1.
    """
    if limit is not None and limit < 1:
        raise ValueError(f"limit is {limit}; expected None or a number of samples ≥ 1")
    part = "train" if train else "t10k"
    images_path = _find(Path(root), f"{part}-images-idx3-ubyte")
    labels_path = _find(Path(root), f"{part}-labels-idx1-ubyte")
    images, classes = read_idx(images_path), read_idx(labels_path)
    if images.shape[1:] != (28, 28):
        raise ValueError(f"{images_path}: holds {images.shape}; expected (samples, 28, 28)")
    if classes.shape != images.shape[:1]:
        raise ValueError(
            f"{labels_path}: holds {classes.shape} classes for the {len(images)} images of "
            f"{images_path.name}; expected ({len(images)},)"
        )
    if classes.size and classes.max() > 9:
        raise ValueError(f"{labels_path}: holds class {classes.max()}; expected 0 to 9")

    pixels = torch.from_numpy(images[:limit]).unsqueeze(1).float() / 255
    return TensorDataset(
        (pixels - 0.286) / 0.353,  # mean and deviation of the training pixels
        torch.from_numpy(classes[:limit].astype(np.int64)),
    )


def read_idx(path: Path) -> NDArray[np.uint8]:
    """Read the array in an idx file of unsigned bytes; a file whose name ends in `.gz` is unpacked first.

    Returns:
        A writable uint8 array of the shape that the file states.

    Raises:
        ValueError: the file is damaged, of another format, or of another dtype.
    """
    raw = path.read_bytes()
    if path.suffix == ".gz":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: damaged gzip file ({error}); {_FASHION_HELP}") from None
    if len(raw) < 4 or raw[:2] != b"\0\0":
        raise ValueError(f"{path}: starts with {raw[:4]!r}; expected an idx file (two zero bytes)")
    dtype, num_dimensions = raw[2], raw[3]
    if dtype != _IDX_UINT8:
        raise ValueError(f"{path}: idx dtype 0x{dtype:02x}; expected 0x08, unsigned bytes")
    start = 4 + 4 * num_dimensions
    if len(raw) < start:
        raise ValueError(f"{path}: {len(raw)} bytes; its idx header alone needs {start}")
    shape = tuple(int(size) for size in np.frombuffer(raw[4:start], dtype=">u4"))
    expected = start + math.prod(shape)
    if len(raw) != expected:
        raise ValueError(
            f"{path}: {len(raw)} bytes; expected {expected} = {start} for the header + "
            f"{' × '.join(map(str, shape))}"
        )
    # torch needs writable memory, so the array is copied.
    return np.frombuffer(raw, dtype=np.uint8, offset=start).reshape(shape).copy()


def _find(root: Path, name: str) -> Path:
    """Return the path `root/name`, or else `root/name.gz`."""
    for path in (root / name, root / f"{name}.gz"):
        if path.is_file():
            return path
    raise FileNotFoundError(f"{root / name}[.gz] is missing; {_FASHION_HELP}, or set `root`")
