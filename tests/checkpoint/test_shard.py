import json
import math
import pickle
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hybridpipe.checkpoint import header
from hybridpipe.checkpoint.shard import _DTYPES, PlainFile, read_shard, write_plain, write_shard
from hybridpipe.errors import UserError

TENSORS = {
    "model.weight": torch.linspace(-1, 1, 12).view(3, 4),
    "model.transposed": torch.linspace(-1, 1, 12).view(3, 4).t(),
    "model.expanded": torch.tensor([3.5]).expand(5),
    "model.half": torch.tensor([1.5, math.nan, math.inf], dtype=torch.bfloat16),
    "model.mask": torch.tensor([True, False]),
    "optimizer.step": torch.tensor(3),
    "empty": torch.empty(0, 3),
    'a "name" of\nits own ü \ud83d\ude00'.encode("utf-16", "surrogatepass").decode("utf-16"): torch.ones(1),
}
META = {"list": [1, -2.5, None, True], "text": 'ü"\n', "infinity": math.inf, "nested": {"": []}}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    described = [{k: (t.dtype, t.shape, bits(t)) for k, t in each.items()} for each in (one, other)]
    return described[0] == described[1]


def read_plain(path: Path) -> dict[str, torch.Tensor]:
    file = PlainFile(path)
    return {name: file.read(name) for name in file.forms}


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "stage-000.safetensors"


def test_what_is_written_is_read_and_others_read_it_too(path):
    entry = write_shard(path, TENSORS, META)
    tensors, meta = read_shard(path, entry)
    assert same(tensors, TENSORS) and meta == META
    assert same(load_file(path), TENSORS)
    assert (entry.name, entry.num_bytes) == (path.name, path.stat().st_size)


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=_DTYPES)
def test_every_dtype_is_kept_bit_for_bit_and_named_as_safetensors_names_it(path, dtype):
    size = dtype.itemsize
    values = torch.arange(2 if dtype == torch.bool else 48, dtype=torch.uint8)
    tensors = {"x": values.view(dtype).view(-1, 1), "scalar": values[:size].clone().view(dtype).view(())}
    write_plain(path, tensors)
    assert same(read_plain(path), tensors) and same(load_file(path), tensors)
    save_file(tensors, path)
    assert same(read_plain(path), tensors)


def test_tensors_are_aligned_for_who_maps_the_file(path):
    write_plain(path, {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(1, dtype=torch.float64)})
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    assert length % 8 == 0 and json.loads(data[8 : 8 + length])["b"]["data_offsets"] == [0, 8]


def test_tensors_that_share_memory_are_each_written(path):
    shared = torch.ones(4)
    write_plain(path, {"a": shared, "b": shared, "c": shared[1:]})
    assert [len(tensor) for tensor in read_plain(path).values()] == [4, 4, 3]


@pytest.mark.parametrize(
    "tensors, told",
    [
        (
            {"x": torch.ones(1, dtype=torch.complex128)},
            "tensor 'x': safetensors cannot hold it: torch.complex128",
        ),
        ({"x": torch.ones(2, 2).to_sparse()}, "tensor 'x': safetensors cannot hold it: .*sparse"),
        ({"__metadata__": torch.ones(1)}, "tensor '__metadata__': safetensors cannot hold it"),
    ],
)
def test_what_the_format_cannot_hold_is_refused_before_a_file_is_made(path, tensors, told):
    with pytest.raises(UserError, match=f"{path.name}: {told}"):
        write_shard(path, tensors, None)
    assert not path.exists()


@pytest.mark.parametrize("meta", [{1: 2}, {"x": torch.ones(1)}, [Path()], {"x": {1, 2}}])
def test_what_json_would_change_is_refused(path, meta):
    with pytest.raises(TypeError, match="JSON"):
        write_shard(path, {}, meta)
    assert not path.exists()


# --- hostile files ---------------------------------------------------------------------------------------


def file_of(document, data: bytes = b"", length: int | None = None) -> bytes:
    text = document if isinstance(document, bytes) else json.dumps(document).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def tensor(dtype="F32", shape=(1,), offsets=(0, 4), **more) -> dict:
    return {"x": {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}}


TERABYTE = 1 << 40


@pytest.mark.parametrize(
    "content, told",
    [
        (b"", "must be a safetensors file, got 0 bytes"),
        (b"\x00" * 7, "must be a safetensors file, got 7 bytes"),
        (b"\x00" * 8, "header: must be JSON"),
        (pickle.dumps({"x": 1}, protocol=4), "must be a safetensors file: its header should have"),
        (file_of({}, length=TERABYTE), "its header should have 1,099,511,627,776 bytes"),
        (file_of({}, length=2**64 - 1), "its header should have"),
        (file_of({}, length=3), "header should have 3 bytes"),
        (file_of(tensor(shape=(TERABYTE // 4,), offsets=(0, TERABYTE))), "declares 1,099,511,627,776 bytes"),
        (file_of(tensor(shape=(TERABYTE,))), "data_offsets: must be 4,398,046,511,104 bytes for F32"),
        (file_of(tensor(shape=(2**62, 2**62, 0), offsets=(0, 0))), "shape: is too large"),
        (file_of(tensor(shape=(10**30, 0), offsets=(0, 0))), "shape: must be at most 64 integers >= 0"),
        (file_of(tensor(shape=(-1,)), bytes(4)), "shape: must be at most 64 integers >= 0, got [-1]"),
        (file_of(tensor(shape=(True,)), bytes(4)), "shape: must be at most 64 integers >= 0"),
        (file_of(tensor(shape=(1.0,)), bytes(4)), "shape: must be at most 64 integers >= 0"),
        (file_of(tensor(offsets=(4, 0)), bytes(4)), "data_offsets: must be 4 bytes"),
        (file_of(tensor(offsets=(-4, 0)), bytes(4)), "data_offsets: must be two integers >= 0"),
        (file_of(tensor(offsets=(0, 4, 8)), bytes(4)), "data_offsets: must be two integers"),
        (file_of(tensor(offsets=(4, 8)), bytes(8)), "data_offsets: must begin at 0, got 4"),
        (file_of(tensor(), bytes(3)), "declares 4 bytes of tensors, and the file holds 3"),
        (file_of(tensor(), bytes(5)), "declares 4 bytes of tensors, and the file holds 5"),
        (file_of({"y": tensor()["x"], **tensor()}, bytes(4)), "data_offsets: must begin at 4, got 0"),
        (
            file_of({**tensor(), "y": tensor(offsets=(5, 9))["x"]}, bytes(9)),
            "data_offsets: must begin at 4, got 5",
        ),
        (file_of(tensor(shape=(1,) * 65)), "shape: must be at most 64 integers >= 0, got [1, 1"),
        (file_of(tensor(shape=(2**63, 0), offsets=(0, 0))), "shape: must be at most 64 integers >= 0"),
        (file_of(tensor(dtype="F128"), bytes(4)), "dtype: unknown 'F128'"),
        (file_of(tensor(dtype=["F32"]), bytes(4)), "dtype: unknown ['F32']"),
        (file_of(tensor(code="print()"), bytes(4)), "must have dtype, shape and data_offsets"),
        (file_of({"x": None}), "must have dtype, shape and data_offsets"),
        (file_of([]), "header: must be a JSON object"),
        (file_of({"__metadata__": {"a": 1}}), "__metadata__: must be an object of strings"),
        (file_of(b'{"x": {}, "x": {}}'), "a name occurs twice"),
        (file_of(b"[" * 100_000), "header: must be JSON"),
        (file_of(tensor("BOOL", offsets=(0, 1)), b"\x02"), "BOOL must be bytes of 0 and 1"),
        (file_of(tensor(), bytes(4)), "must be a checkpoint's file, got one without 'hybridpipe-shard/1'"),
        (file_of({"__metadata__": {"hybridpipe-shard/1": "{"}}), "hybridpipe-shard/1: must be JSON"),
    ],
)
def test_a_hostile_file_is_refused_in_one_line_and_little_memory(path, content, told):
    path.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(UserError) as refused:
        read_shard(path, None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(refused.value).startswith(f"{path}: ") and told in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300 + len(str(path))
    assert peak < 2_000_000 + 30 * len(content)


def test_no_tensor_is_allocated_for_a_file_that_cannot_hold_it(path, monkeypatch):
    """Not seen by tracemalloc: torch has an allocator of its own."""
    path.write_bytes(file_of(tensor(shape=(TERABYTE // 4,), offsets=(0, TERABYTE))))
    monkeypatch.setattr(torch, "empty", None)
    with pytest.raises(UserError, match="declares 1,099,511,627,776 bytes of tensors, and the file holds 0"):
        read_plain(path)


def test_a_tensor_is_read_into_another_of_any_strides(path):
    write_plain(path, {"a": torch.arange(6.0).view(2, 3)})
    file = PlainFile(path)
    for there in (torch.zeros(2, 3), torch.zeros(3, 2).t(), torch.nn.Parameter(torch.zeros(2, 3))):
        address = there.data_ptr()
        file.overwrite(there, "a")
        assert there.tolist() == [[0, 1, 2], [3, 4, 5]] and there.data_ptr() == address


def test_a_file_that_has_changed_since_its_header_was_read(path):
    write_plain(path, {"a": torch.ones(3), "b": torch.arange(4)})
    file = PlainFile(path)
    assert file.forms["b"].is_meta and file.read("b").tolist() == [0, 1, 2, 3]
    path.unlink()
    write_plain(path, {"a": torch.ones(30)})
    with pytest.raises(UserError, match=r"must have \d+ bytes as before, got \d+"):
        file.read("a")


def test_a_sparse_file_of_a_terabyte_is_refused_before_it_is_read(path):
    entry = write_shard(path, TENSORS, META)
    with path.open("r+b") as file:
        file.truncate(TERABYTE)
    with pytest.raises(UserError, match=f"must have {entry.num_bytes:,} bytes, got {TERABYTE:,}"):
        read_shard(path, entry)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("shard") / "stage-000.safetensors"
    return path, write_shard(path, TENSORS, META), path.read_bytes()


@settings(deadline=None, derandomize=True, max_examples=300)
@given(data=st.data(), verified=st.booleans())
def test_flipped_and_cut_files_are_refused_or_identical(written, data, verified):
    """Against the manifest's entry always refused; without one, read as something or refused, in one line."""
    path, entry, content = written
    if data.draw(st.booleans(), "flip"):
        bit = data.draw(st.integers(0, 8 * len(content) - 1))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
    else:
        one, other = (data.draw(st.integers(0, len(content))) for _ in range(2))
        damaged = bytearray(content[: min(one, other)] + content[max(one, other) :])
    path.write_bytes(damaged)
    try:
        tensors, meta = read_shard(path, entry if verified else None)
    except UserError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
    else:
        assert not verified or (same(tensors, TENSORS) and meta == META)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(
    st.dictionaries(
        st.text(max_size=3),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["F32", "U8", "F64", "x"]),
                "shape": st.lists(st.integers(-1, 3) | st.just(2**62), max_size=3),
                "data_offsets": st.lists(st.integers(-1, 40), min_size=1, max_size=3),
            }
        ),
        max_size=3,
    ),
    st.integers(0, 40),
)
def test_headers_that_lie_are_refused_as_safetensors_refuses_them(written, document, num_bytes):
    path = written[0]
    path.write_bytes(file_of(document, bytes(num_bytes)))
    try:
        tensors = read_plain(path)
    except UserError as error:
        assert str(error).startswith(f"{path}: ")
    else:
        assert same(tensors, load_file(path))


# --- writing that fails ----------------------------------------------------------------------------------

FULL = """
import resource, sys, torch
from pathlib import Path
from hybridpipe.checkpoint.shard import write_shard
from hybridpipe.errors import UserError
path = Path(sys.argv[1])
for limit in (0, 5, 300, 1000, 4000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        write_shard(path, {"x": torch.zeros(1000)}, None)
    except UserError as error:
        print(error)
    else:
        print("written")
    print(path.exists())
"""


def test_a_full_disk_is_told_and_leaves_no_part(path):
    told = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, check=True
    ).stdout
    assert told.splitlines() == [f"{path}: cannot be written: File too large", "False"] * 5


def test_an_interrupted_writing_leaves_no_part(path, monkeypatch):
    monkeypatch.setattr(header, "encode", lambda *_: (b"", [header.Slot("not there", "F32", (), 0, 4)]))
    with pytest.raises(KeyError):
        write_plain(path, {})
    assert not path.exists()
