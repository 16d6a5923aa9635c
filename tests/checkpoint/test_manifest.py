import hashlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridpipe.checkpoint.manifest import FileEntry, Manifest, from_text, to_text
from hybridpipe.errors import UserError
from tests.checkpoint.helpers import DESCRIBED

ENTRY = FileEntry("stage-000.safetensors", 10, "0" * 64)
MANIFEST = Manifest(step=120, files=(ENTRY, FileEntry("rank-0001.safetensors", 3, "a" * 64)), **DESCRIBED)
TEXT = to_text(MANIFEST).encode()


def edited(**fields) -> bytes:
    """A manifest that says something else, and whose checksum is right; None takes a field out."""
    document = {**json.loads(TEXT), **fields}
    said = {name: value for name, value in document.items() if value is not None and name != "checksum"}
    canonical = json.dumps(said, sort_keys=True, separators=(",", ":"))
    return json.dumps({**said, "checksum": hashlib.sha256(canonical.encode()).hexdigest()}).encode()


def test_what_is_written_is_read():
    assert from_text(TEXT, "manifest.json") == MANIFEST
    assert from_text(edited(), "manifest.json") == MANIFEST
    assert (
        MANIFEST.entry("stage-000.safetensors") == ENTRY and MANIFEST.entry("stage-001.safetensors") is None
    )


@pytest.mark.parametrize(
    "text, told",
    [
        (b"", "must be JSON"),
        (b"\x80\x04\x95", "must be UTF-8 text, got byte 0x80"),
        (b"[1]", "must be a JSON object, got [1]"),
        (b"{", "must be JSON"),
        (b"[" * 100_000, "must be JSON"),
        (b'{"a":' * 900 + b"1" + b"}" * 900, "format: must be"),
        (b'{"format": 1, "format": 2}', "a name occurs twice"),
        (edited(format="hybridpipe-checkpoint/2"), "format: must be 'hybridpipe-checkpoint/1', got"),
        (edited(format=None), "format: must be 'hybridpipe-checkpoint/1', got none"),
        *((edited(**{field: None}), f"{field}: is required, but missing") for field in ("step", *DESCRIBED)),
        (edited(files=None), "files: is required, but missing"),
        (edited(files=[]), "files: must name at least one file"),
        (edited(files=[{"name": "a", "num_bytes": 1}]), "files[0].sha256: is required, but missing"),
        (edited(step="120"), "step: must be"),
        (edited(step=True), "step: must be"),
        (edited(step=-1), "step: must be an integer >= 0, got -1"),
        (edited(step=1e3), "step: must be"),
        (edited(step=10**30), "step: must be an integer of at most 64 bits"),
        (edited(steps=3), "steps: unknown field (did you mean 'step'?"),
        (edited(run=[]), "run: must be"),
        (edited(versions={"torch": 2}), "versions.torch: must be"),
        (TEXT.replace(b'"checksum"', b'"checksun"'), "checksun: unknown field"),
        (TEXT.replace(b'"step": 120', b'"step": 121'), "checksum: does not fit the rest"),
        (TEXT.replace(b'"learning_rate": 0.1', b'"learning_rate": 1e999'), "must be a finite number"),
        (TEXT.replace(b'"learning_rate": 0.1', b'"learning_rate": NaN'), "must be a finite number"),
    ],
)
def test_a_wrong_manifest_is_refused_in_one_line(text, told):
    with pytest.raises(UserError) as refused:
        from_text(text, "manifest.json")
    assert str(refused.value).startswith("manifest.json: ") and told in str(refused.value)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "name",
    [
        "../stage-000.safetensors",
        "/etc/passwd",
        "a/b",
        "..",
        ".",
        "",
        ".hidden",
        "a\\b",
        "a\0b",
        "manifest.json",
    ],
)
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(UserError, match=r"files\[0\].name: must be a plain file name"):
        from_text(edited(files=[{"name": name, "num_bytes": 1, "sha256": "0" * 64}]), "manifest.json")


def test_a_file_listed_twice_is_refused():
    entry = {"name": "a", "num_bytes": 1, "sha256": "0" * 64}
    with pytest.raises(UserError, match="files: must name every file once, got 'a' twice"):
        from_text(edited(files=[entry, entry]), "manifest.json")


@settings(deadline=None, derandomize=True)
@given(st.integers(0, len(TEXT) * 8 - 1))
def test_a_flipped_bit_is_refused_or_changes_nothing(bit):
    text = bytearray(TEXT)
    text[bit // 8] ^= 1 << bit % 8
    refused_or_equal(bytes(text))


@settings(deadline=None, derandomize=True)
@given(st.integers(0, len(TEXT)), st.integers(0, len(TEXT)), st.binary(max_size=8))
def test_a_part_that_is_lost_or_overwritten_is_refused_or_changes_nothing(one, other, instead):
    start, stop = sorted((one, other))
    refused_or_equal(TEXT[:start] + instead + TEXT[stop:])


@settings(deadline=None, derandomize=True)
@given(st.binary(max_size=300))
def test_any_bytes_are_refused(text):
    refused_or_equal(text)


def refused_or_equal(text: bytes) -> None:
    try:
        assert from_text(text, "manifest.json") == MANIFEST
    except UserError as error:
        assert "\n" not in str(error)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.text()
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, derandomize=True)
@given(st.dictionaries(st.text(), json_values, max_size=4))
def test_whatever_json_a_run_says_is_given_back(run):
    manifest = Manifest(**{**vars(MANIFEST), "run": run})
    assert repr(from_text(to_text(manifest).encode(), "manifest.json").run) == repr(run)
