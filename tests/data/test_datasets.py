import gzip
import importlib.util
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hybridpipe.data.datasets import digits, fashion_mnist, read_idx
from hybridpipe.errors import REMEDIES


def idx(values: np.ndarray, dtype: int = 0x08) -> bytes:
    header = struct.pack(f">BBBB{values.ndim}I", 0, 0, dtype, values.ndim, *values.shape)
    return header + values.tobytes()


def images(num_samples: int) -> np.ndarray:
    return np.arange(num_samples * 28 * 28, dtype=np.uint8).reshape(num_samples, 28, 28)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six training images as .gz, four plain test images, as the Debian package names them."""
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(images(6))))
    labels = np.array([9, 0, 1, 2, 3, 4], dtype=np.uint8)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(labels)))
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(images(4)))
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(idx(labels[:4]))
    return tmp_path


def test_digits_are_split_by_class_and_for_good():
    train, test = digits(train=True), digits(train=False)
    assert (len(train), len(test)) == (1437, 360)
    inputs, targets = train.tensors
    assert (inputs.shape, inputs.dtype) == ((1437, 1, 8, 8), torch.float32)
    assert (targets.shape, targets.dtype) == ((1437,), torch.int64)
    assert abs(inputs.mean()) < 0.01 and abs(inputs.std() - 1) < 0.01
    assert (test.tensors[1].bincount(minlength=10) - 36).abs().max() <= 1
    # The same samples on every machine and in every version of numpy.
    assert test.tensors[1][:12].tolist() == [9, 2, 5, 7, 6, 9, 7, 3, 3, 3, 4, 6]


def test_digits_are_those_of_scikit_learn_without_loading_it():
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    ours = torch.cat([digits(train=train).tensors[0] for train in (True, False)]).flatten(1)
    found = {tuple(row) for row in (ours * 0.376 + 0.305).mul(16).round().int().tolist()}
    assert found == {tuple(row) for row in pixels.astype(int).tolist()} and len(classes) == len(ours)
    loads = (
        "import sys; from hybridpipe.data import datasets; datasets.digits(); print('sklearn' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", loads], text=True) == "False\n"


def test_no_digit_is_in_both_parts():
    everything = torch.cat([digits(train=train).tensors[0].flatten(1) for train in (True, False)])
    assert len(everything.unique(dim=0)) == 1797


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match="pip install scikit-learn transformers") as caught:
        digits()
    assert caught.value.name in REMEDIES, "commands tell it in one line"


@pytest.mark.parametrize("train, num_samples", [(True, 6), (False, 4)])
def test_fashion_mnist(root, train, num_samples):
    inputs, targets = fashion_mnist(str(root), train).tensors
    assert (inputs.shape, inputs.dtype) == ((num_samples, 1, 28, 28), torch.float32)
    assert targets.dtype == torch.int64 and targets.tolist() == [9, 0, 1, 2, 3, 4][:num_samples]
    expected = (torch.from_numpy(images(num_samples)).float() / 255 - 0.286) / 0.353
    torch.testing.assert_close(inputs[:, 0], expected)


def test_limit(root):
    assert len(fashion_mnist(str(root), limit=2)) == 2
    assert len(fashion_mnist(str(root), limit=100)) == 6
    with pytest.raises(ValueError, match="limit is 0"):
        fashion_mnist(str(root), limit=0)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "expected an idx file"),
        (b"\0\0\x08", "expected an idx file"),
        (b"P5 28 28 255\n", "expected an idx file"),
        (idx(images(6), dtype=0x0D), "dtype 0x0d; expected 0x08, unsigned bytes"),
        (idx(images(6))[:9], "9 bytes; its idx header alone needs 16"),
        (idx(images(6))[:-1], "4719 bytes; expected 4720 = 16 for the header + 6 × 28 × 28"),
        (idx(images(6)) + b"!", "4721 bytes; expected 4720"),
        (
            struct.pack(">BBBB3I", 0, 0, 8, 3, *[2**32 - 1] * 3),
            "16 bytes; expected 79228162458924105385300197391",
        ),
        (idx(images(6)[:, :8, :8].copy()), r"holds (6, 8, 8); expected (samples, 28, 28)"),
        (idx(images(6)[0]), r"holds (28, 28); expected (samples, 28, 28)"),
        (idx(np.array(7, dtype=np.uint8)), r"holds (); expected (samples, 28, 28)"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_malformed_images(root, content, message, packed):
    path = root / "train-images-idx3-ubyte.gz"
    path.unlink()
    if packed:
        path.write_bytes(gzip.compress(content))
    else:
        path.with_suffix("").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(message)) as raised:
        fashion_mnist(str(root))
    assert path.with_suffix("").name in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "labels, message",
    [
        ([0, 1, 2], r"holds (3,) classes for the 6 images"),
        ([[0, 1, 2, 3, 4, 5]], r"holds (1, 6) classes"),
        ([0, 1, 2, 3, 4, 10], "holds class 10; expected 0 to 9"),
    ],
)
def test_malformed_labels(root, labels, message):
    path = root / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.array(labels, dtype=np.uint8))))
    with pytest.raises(ValueError, match=re.escape(message)):
        fashion_mnist(str(root))


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:-9],
        lambda packed: packed[:40] + b"\xff" * 20 + packed[60:],
        lambda packed: b"no" + packed,
    ],
    ids=["truncated", "overwritten", "no gzip"],
)
def test_damaged_gzip(root, damage):
    path = root / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"train-images-idx3-ubyte\.gz: damaged gzip file"):
        read_idx(path)


def test_missing_file_says_where_it_comes_from(root):
    (root / "t10k-labels-idx1-ubyte").unlink()
    message = r"t10k-labels-idx1-ubyte\[\.gz\] is missing; `apt-get install dataset-fashion-mnist`"
    with pytest.raises(FileNotFoundError, match=message):
        fashion_mnist(str(root), train=False)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="dataset-fashion-mnist absent"
)
def test_the_debian_package():
    train, test = fashion_mnist(), fashion_mnist(train=False)
    assert (len(train), len(test)) == (60000, 10000)
    inputs, targets = train.tensors
    assert abs(inputs.mean()) < 0.01 and abs(inputs.std() - 1) < 0.01
    assert targets.bincount().tolist() == [6000] * 10
