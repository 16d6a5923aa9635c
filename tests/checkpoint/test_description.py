"""Descriptions of tensors in pickles, as torch writes them and as nobody should."""

import io
import math
import pickle
import random
import tracemalloc
from itertools import pairwise, product
from pathlib import PosixPath

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from hybridpipe.checkpoint.description import read_description
from hybridpipe.errors import UserError


def part(offsets, sizes) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def described(size=(2, 3), parts=(((0, 0), (2, 3)),), name="w", file: object = "__0_0.distcp") -> Metadata:
    """Return what torch writes of one tensor, with other things beside it."""
    chunks = [part(*each) for each in parts]
    tensor = TensorStorageMetadata(TensorProperties(torch.bfloat16), torch.Size(size), chunks)
    places = {MetadataIndex(name, each.offsets, i): _StorageInfo(file, 7, 9) for i, each in enumerate(chunks)}
    return Metadata(
        {name: tensor, "step": BytesStorageMetadata()},
        planner_data={name: ("model", 0, name)},
        storage_data=places | {MetadataIndex("step"): _StorageInfo("__1_0.distcp", 0, 2**33)},
        storage_meta=StorageMeta(PosixPath("/some/folder"), "id"),
    )


def read(value: object) -> Metadata:
    return read_description(value if isinstance(value, bytes) else pickle.dumps(value), "FILE")


def refused(value: object) -> str:
    """Return what is said of a description, in one line."""
    with pytest.raises(UserError) as told:
        read(value)
    line = str(told.value)
    assert line.startswith("FILE: ") and "\n" not in line and len(line) < 200
    return line.removeprefix("FILE: ")


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_a_description_is_read_as_torch_would_read_it(protocol):
    written = described()
    found = read(pickle.dumps(written, protocol=protocol))
    assert found.state_dict_metadata == {"w": written.state_dict_metadata["w"]}
    assert found.storage_data == written.storage_data


class Evil:
    def __reduce__(self):
        return print, ("run",)


class Hidden:
    def __reduce__(self):
        return eval, ("print('run')",)


NAMES = "which may run code; must name torch's descriptions of tensors only"
NEEDS = "which no description of tensors needs"


@pytest.mark.parametrize(
    "made, told",
    [
        (pickle.dumps(Evil()), f"names 'builtins.print', {NAMES}"),
        (pickle.dumps(Evil(), protocol=0), f"names '__builtin__.print', {NAMES}"),
        (pickle.dumps(Evil(), protocol=2), f"names '__builtin__.print', {NAMES}"),
        (pickle.dumps({"a": [Hidden()]}), f"names 'builtins.eval', {NAMES}"),
        (b"\x80\x04\x8c\x02os\x94\x8c\x06system\x94h\x00h\x01\x93.", f"names 'os.system', {NAMES}"),
        (b"\x80\x04\x8c\x05torch\x8c\x04Size\x8c\x02os\x8c\x06system\x93.", f"names 'os.system', {NAMES}"),
        (
            b"\x80\x04\x8c\x02os\x8c\x06system\x8c\x05torch\x8c\x04Size00\x93.",
            f"has the operation POP, {NEEDS}",
        ),
        (b"\x80\x04(\x8c\x02os\x8c\x06systemt\x93.", "must be torch's description of tensors: "),
        (b"(ios\nsystem\n.", f"has the operation INST, {NEEDS}"),
        (b"\x82\x01.", f"has the operation EXT1, {NEEDS}"),
        (pickle.dumps(torch.nn.Linear), f"names 'torch.nn.modules.linear.Linear', {NAMES}"),
        (b"", "must be torch's description of tensors: 'ValueError: pickle exhausted"),
        (pickle.dumps({"a": 1}), "must be torch's description of tensors: 'ValueError: Metadata is missing'"),
    ],
)
def test_what_could_run_code_or_is_none_is_refused(capsys, made, told):
    assert refused(made).startswith(told)
    assert capsys.readouterr().out == ""


def test_a_description_leaves_torchs_classes_as_they_are():
    """A pickle may set attributes of a class that it names, which unpickling did."""

    class Changed(pickle._Pickler):
        def save(self, value, *more):
            super().save(value, *more)
            if value is Metadata:  # (None, {"version": "changed"}) as its state
                self.write(b"N}\x8c\x07version\x8c\x07changeds\x86b")

    file = io.BytesIO()
    Changed(file).dump(described())
    assert "_Object is missing" in refused(file.getvalue())
    assert Metadata.version is None


@pytest.mark.parametrize(
    "parts, told",
    [
        ((((0, 0), (2, 2)),), "tensor 'w': its parts must have 6 elements together, got 4"),
        (
            (((0, 0), (1, 3)), ((0, 0), (1, 3))),
            "tensor 'w': its parts must not overlap, and some do",
        ),
        (
            (((0, 0), (2, 2)), ((1, 1), (1, 2))),
            "tensor 'w': its parts must not overlap, and some do",
        ),
        ((((0, 1), (2, 3)),), "tensor 'w': its parts must be inside [2, 3], got one that ends at [2, 4]"),
        ((((0,), (6,)),), "tensor 'w': its parts must be inside [2, 3], got one that ends at [6]"),
        (
            (((0, 0), (-2, -3)),),
            "must be torch's description of tensors: 'ValueError: integers >= 0 are missing'",
        ),
    ],
)
def test_parts_that_do_not_cover_a_tensor_are_refused(parts, told):
    """Torch left the rest as it found it in memory: two parts on one place have the right sum, too."""
    assert refused(described(parts=parts)).startswith(told)


def grid(*axes):
    """Return parts between these bounds along each axis."""
    spans = product(*(pairwise(bounds) for bounds in axes))
    return [([a for a, _ in each], [b - a for a, b in each]) for each in spans]


@pytest.mark.parametrize(
    "axes",
    [
        [range(2001)],
        [(0, 1), range(501)],
        [range(0, 301, 3), (0, 5, 6, 20)],
        [(0, 2, 2, 5), (0, 3, 7), (0, 0, 4)],
        [],
    ],
)
@pytest.mark.timeout(30)
def test_parts_may_cut_a_tensor_in_any_way(axes):
    size = [bounds[-1] for bounds in axes]
    parts = grid(*axes)
    found = read(described(size, parts[::-1]))
    filled = [each for each in parts if math.prod(each[1])]
    assert len(found.state_dict_metadata["w"].chunks) == len(filled)


class FalsePath:
    """A path with another text than its parts, which the check of the file's name looked at."""

    def __reduce__(self):
        return PosixPath, ("../../elsewhere",), (None, {"_str": "__0_0.distcp"})


def test_a_path_with_a_false_text_is_no_name_of_a_file():
    assert "str is missing" in refused(described(file=FalsePath()))


def nested(depth: int) -> bytes:
    """Return the operations of a value of 12 bytes a level, whose text doubles with each."""
    levels = (n.to_bytes(4, "little") for n in range(10**6, 10**6 + depth))
    return b")" + b"".join(b"r" + n + b"j" + n + b"\x86" for n in levels)


@pytest.mark.parametrize(
    "hole",
    [
        b"X\4\0\0\0FILE",
        b"X\4\0\0\0NAME",
        b"ctorch\nbfloat16\n",
        b"K\x02K\x03\x86",
        b"X\6\0\0\0chunks",
        b"K\x07",
    ],
)
def test_a_value_whose_text_takes_gigabytes_is_not_told(hole):
    whole = pickle.dumps(described(name="NAME", file="FILE"), protocol=2)
    hostile = whole.replace(hole, nested(24), 1)
    assert hostile != whole
    tracemalloc.start()
    try:
        refused(hostile)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    "made",
    [
        pytest.param(b"\x80\x02}" + nested(60) + b"Ns.", id="a key that takes years to hash"),
        pytest.param(b"\x80\x02Nr\xff\xff\xff\x7f.", id="a place of the memo that takes 32 GB to reach"),
        pytest.param(pickle.dumps(10**100_000), id="a number too long to tell"),
        pytest.param(b"(" * 10**5 + b"t" * 10**5 + b".", id="tuples in tuples"),
    ],
)
def test_a_few_bytes_do_not_take_a_machines_time_or_memory(made):
    assert "Metadata is missing" in refused(made)


@pytest.mark.timeout(20)
def test_tensors_that_share_a_list_of_parts_are_not_read_over_and_over():
    parts = [part([i], [1]) for i in range(3000)]
    tensor = [
        TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([3000]), parts) for _ in range(3000)
    ]
    made = Metadata({f"w{i}": each for i, each in enumerate(tensor)}, storage_data={})
    assert refused(made) == "tensor 'w1': its parts must have 3000 elements together, got 0"


def test_of_parts_that_are_moved_those_that_cover_the_tensor_are_read():
    draw, seen = random.Random(0), []
    for _ in range(300):
        parts = [([*offsets], sizes) for offsets, sizes in grid(range(3), (0, 1, 3), range(0, 5, 2))]
        moved, length = draw.choice(parts)
        axis = draw.randrange(3)
        moved[axis] = draw.randrange((2, 3, 4)[axis] - length[axis] + 1)
        covered = torch.zeros(2, 3, 4)
        for offsets, sizes in parts:
            covered[tuple(slice(a, a + b) for a, b in zip(offsets, sizes, strict=True))] += 1
        seen.append(bool((covered == 1).all()))
        if seen[-1]:
            read(described((2, 3, 4), parts))
        else:
            assert refused(described((2, 3, 4), parts)).endswith("its parts must not overlap, and some do")
    assert 20 < sum(seen) < 280


@pytest.mark.timeout(20)
def test_parts_of_which_each_meets_all_others_along_an_axis_take_no_hours():
    """They were compared two by two: 250 kB took 7 s, and 25 MB a day."""
    n = 5000
    parts = [((i, i), (n, 1)) for i in range(n)] + [((n, 0), (n, n))]
    assert refused(described((2 * n, n), parts)) == "tensor 'w': its parts must not overlap, and some do"


def test_a_part_that_an_extension_has_packed_is_refused():
    """Nothing tells how much memory it takes to unpack it."""
    made = described()
    for each in made.storage_data.values():
        object.__setattr__(each, "transform_descriptors", ["stream.zstd/1"])
    assert refused(made) == "must have parts that no extension of torch has transformed"
