import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.manifest import FileEntry
from hybridpipe.checkpoint.names import name_of, parse_name
from hybridpipe.checkpoint.shard import write_shard
from hybridpipe.errors import UserError
from tests.checkpoint.helpers import DESCRIBED, FILES, names, save, tree, value_of, write_files

STEPS = ["step-00000100", "step-00000120"]


@pytest.fixture
def root(tmp_path) -> Path:
    """Two checkpoints, of steps 100 and 120."""
    save(tmp_path / "checkpoints", 100)
    save(tmp_path / "checkpoints", 120)
    return tmp_path / "checkpoints"


def test_a_checkpoint_is_as_it_was_described(root):
    manifest = directory.verify(root / STEPS[1])
    assert {name: getattr(manifest, name) for name in DESCRIBED} == DESCRIBED
    assert (manifest.step, tuple(file.name for file in manifest.files)) == (120, FILES)
    assert directory.last_good(root) == (root / STEPS[1], [])
    assert names(root) == ["latest", *STEPS]
    assert (root / "latest").read_text() == "step-00000120\n"


def test_the_module_needs_neither_torch_nor_mpi():
    probe = "import sys, hybridpipe.checkpoint.directory; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"


@pytest.mark.parametrize(
    "step, state, name",
    [
        (0, None, "step-00000000"),
        (123456789, None, "step-123456789"),
        (120, "tmp", ".step-00000120.tmp"),
        (120, "replaced", ".step-00000120.replaced"),
    ],
)
def test_names_say_the_step(step, state, name):
    assert name_of(step, state) == name and parse_name(Path("root") / name) == (step, state)


@pytest.mark.parametrize(
    "name",
    ["step-120", "step-000000120", ".step-00000120", "step-00000120.tmp", ".step-00000120.old", "latest"],
)
def test_other_names_say_nothing(name):
    assert parse_name(Path(name)) is None


def test_an_unfinished_checkpoint_is_not_seen(root):
    write_files(directory.begin(root, 140), 140.0)
    assert directory.last_good(root)[0] == root / STEPS[1]
    directory.abandon(root, 140)
    assert names(root) == ["latest", *STEPS]


def test_everything_is_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """A power cut keeps what was fsynced, in whatever order the rest had been written."""
    log: list[str] = []
    fsync, rename, replace = os.fsync, os.rename, os.replace

    def relative(path) -> str:
        return str(Path(path).relative_to(tmp_path))

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        log.append(f"fsync {relative(os.readlink(f'/proc/self/fd/{descriptor}'))}")

    monkeypatch.setattr(os, "fsync", noted_fsync)
    for name, original in (("rename", rename), ("replace", replace)):

        def noted(a, b, name=name, original=original) -> None:
            original(a, b)
            log.append(f"{name} {relative(b)}")

        monkeypatch.setattr(os, name, noted)
    save(tmp_path / "new" / "root", 7)
    assert log == [
        "fsync new",
        "fsync .",
        *(f"fsync new/root/.step-00000007.tmp/{name}" for name in (*FILES, "manifest.json")),
        "fsync new/root/.step-00000007.tmp",
        "fsync new/root/.latest.tmp",
        "rename new/root/step-00000007",
        "fsync new/root",
        "replace new/root/latest",
        "fsync new/root",
    ]


# --- how many stay ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_last_ones_are_kept(tmp_path, keep):
    for step in (1, 2, 3, 10, 11):
        save(tmp_path, step, keep)
    kept = ["step-00000003", "step-00000010", "step-00000011"][-keep:]
    assert names(tmp_path) == ["latest", *kept]


def test_a_damaged_one_is_not_counted_and_goes_with_the_old_ones(root):
    (root / STEPS[1] / FILES[0]).unlink()
    save(root, 140, keep=2)
    assert names(root) == ["latest", *STEPS, "step-00000140"]
    save(root, 160, keep=2)
    assert names(root) == ["latest", "step-00000140", "step-00000160"]


def test_what_cannot_be_deleted_is_told_and_ends_nothing(root, capsys, monkeypatch):
    rmdir = os.rmdir

    def busy(path, **kwargs) -> None:
        if os.environ.get("BUSY"):
            raise OSError(16, "Device or resource busy")
        rmdir(path, **kwargs)

    monkeypatch.setattr(os, "rmdir", busy)
    monkeypatch.setenv("BUSY", "1")
    save(root, 140, keep=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all("cannot be deleted: Device or resource busy" in line for line in lines)
    assert directory.last_good(root) == (root / "step-00000140", [])
    monkeypatch.delenv("BUSY")
    save(root, 160, keep=1)
    assert names(root) == ["latest", "step-00000160"]


def test_going_back_leaves_newer_ones_alone_until_they_are_reached_again(root):
    save(root, 140, keep=3)
    directory.stand_on(root / STEPS[0])  # resumed from 100 on purpose
    assert directory.last_good(root)[0] == root / STEPS[0]
    save(root, 110, keep=2, value=110.5)
    assert names(root) == ["latest", "step-00000100", "step-00000110", "step-00000120", "step-00000140"]
    assert directory.last_good(root)[0] == root / "step-00000110"
    save(root, 120, keep=2, value=120.5)  # in the place of the old 120
    assert value_of(directory.last_good(root)[0]) == 120.5
    assert names(root) == ["latest", "step-00000110", "step-00000120", "step-00000140"]


def test_a_symbolic_link_is_deleted_not_what_it_points_to(root, tmp_path):
    (root / STEPS[0]).rename(tmp_path / "elsewhere")
    (root / STEPS[0]).symlink_to(tmp_path / "elsewhere")
    assert value_of(root / STEPS[0]) == 100
    save(root, 140, keep=2)
    assert names(root) == ["latest", "step-00000120", "step-00000140"]
    assert value_of(tmp_path / "elsewhere") == 100


# --- what is refused -------------------------------------------------------------------------------------


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) * 2 // 3] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 2)  # the last byte of a manifest is a line feed


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b" ")


class Payload:
    def __reduce__(self):
        return (os.abort, ())


def put_a_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload()))


def put_a_pickle_of_the_same_length(path: Path) -> None:
    path.write_bytes(pickle.dumps(Payload())[: path.stat().st_size].ljust(path.stat().st_size, b"."))


def declare_a_terabyte(path: Path) -> None:
    path.write_bytes((1 << 40).to_bytes(8, "little") + path.read_bytes()[8:])


def put_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_a_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def put_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def exchange(path: Path) -> None:
    other = path.parent.parent / STEPS[0] / path.name
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs), other.write_bytes(mine)


DAMAGES = [
    flip,
    truncate,
    lengthen,
    Path.unlink,
    put_a_pickle,
    put_a_pickle_of_the_same_length,
    declare_a_terabyte,
    put_a_pipe,
    put_a_directory,
    put_a_dangling_link,
]


DAMAGED = [(damage, name) for damage in DAMAGES for name in (*FILES, "manifest.json")]
DAMAGED.remove((lengthen, "manifest.json"))  # by white space, which changes nothing


@pytest.mark.parametrize("damage, name", DAMAGED)
def test_damage_is_refused_in_one_line_and_passed_over(root, damage, name):
    path = root / STEPS[1] / name
    damage(path)
    before = tree(root) if damage is not put_a_pipe else None
    with pytest.raises(UserError) as refused:
        directory.verify(root / STEPS[1])
    told = str(refused.value)
    assert told.startswith(f"{path}: ") and "\n" not in told and len(told) < 400
    assert directory.last_good(root) == (root / STEPS[0], [f"passed over {STEPS[1]}: {told}"])
    assert before is None or tree(root) == before


@pytest.mark.parametrize("name", FILES)
def test_exchanged_shards_of_two_steps_are_refused(root, name):
    path = root / STEPS[1] / name
    exchange(path)
    with pytest.raises(UserError, match=f"{name}: its SHA-256 must be .* damaged or replaced"):
        directory.verify(path.parent)
    found, lines = directory.last_good(root)
    assert found is None and len(lines) == 2


def test_an_exchanged_manifest_or_directory_is_refused(root):
    exchange(root / STEPS[1] / "manifest.json")
    with pytest.raises(UserError, match="step: must be 120 as in the directory's name, got 100"):
        directory.verify(root / STEPS[1])
    exchange(root / STEPS[1] / "manifest.json")
    (root / STEPS[1]).rename(root / "step-00000130")
    with pytest.raises(UserError, match=r"step: must be 130 .* got 120"):
        directory.verify(root / "step-00000130")
    (root / "step-00000130").rename(root / "the-best-one")  # a name of the user's own says nothing
    assert directory.verify(root / "the-best-one").step == 120


def test_an_unknown_file_is_refused(root):
    (root / STEPS[1] / "optimizer.pt").write_bytes(b"?")
    with pytest.raises(UserError, match=r"optimizer\.pt: is not listed in manifest\.json"):
        directory.verify(root / STEPS[1])


@pytest.mark.parametrize(
    "says, told",
    [
        ("", "must name a checkpoint, got ''"),
        ("step-00000130\n", "names step-00000130, which does not exist"),
        ("../checkpoints/step-00000100\n", "must name a checkpoint, got '../checkpoints/step-00000100'"),
        ("step-100\n", "must name a checkpoint, got 'step-100'"),
        ("x" * 1000, "must have at most 100 bytes, got 1,000"),
        ("\0\ufffd", "must name a checkpoint"),
    ],
)
def test_a_wrong_latest_is_told_and_done_without(root, says, told):
    (root / "latest").write_text(says)
    found, (line,) = directory.last_good(root)
    assert found == root / STEPS[1]
    assert line.startswith(f"{root / 'latest'}: ") and told in line


def test_without_latest_the_largest_step_counts(root):
    (root / "latest").unlink()
    assert directory.last_good(root) == (root / STEPS[1], [])


def test_nothing_there(tmp_path):
    assert directory.last_good(tmp_path / "none") == (None, [])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot be read: Not a directory"):
        directory.last_good(tmp_path / "file")
    with pytest.raises(UserError, match="none: must be a checkpoint's directory"):
        directory.verify(tmp_path / "none")


# --- what goes wrong while saving ------------------------------------------------------------------------


def test_a_shard_that_another_machine_wrote_elsewhere_is_missed(root):
    files = write_files(directory.begin(root, 140), 140.0)
    (root / ".step-00000140.tmp" / FILES[1]).unlink()
    with pytest.raises(UserError, match=f"{FILES[1]}: is missing; do all ranks write to one file system"):
        directory.publish(root, 140, files, DESCRIBED, 2)
    assert names(root) == ["latest", *STEPS]


def test_two_trainings_in_one_directory_do_not_mix(root):
    mine = directory.begin(root, 140)
    write_files(mine, 1.0)
    with pytest.raises(UserError, match=f"{FILES[0]}: exists already: does another training write"):
        write_shard(mine / FILES[0], {}, None)
    assert names(root) == ["latest", *STEPS]
    assert (
        value_of(directory.publish(root, 140, write_files(directory.begin(root, 140), 2.0), DESCRIBED, 9))
        == 2
    )


def test_what_the_manifest_could_not_give_back_is_not_published(root):
    for run in ({"loss": float("nan")}, {"seed": 2**64}, {1: 2}, {"path": Path()}):
        files = write_files(directory.begin(root, 140), 140.0)
        with pytest.raises((TypeError, ValueError)):
            directory.publish(root, 140, files, {**DESCRIBED, "run": run}, 2)
        assert names(root) == ["latest", *STEPS]


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", ".hidden", "", "manifest.json", "a\nb", "x" * 300])
def test_names_of_files_are_plain(name):
    with pytest.raises(ValueError, match="name must be a plain file name"):
        FileEntry(name, 1, "0" * 64)


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory"):
        directory.begin(tmp_path / "file" / "root", 1)
    with pytest.raises(UserError, match="file: must be a directory"):
        directory.begin(tmp_path / "file", 1)


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=128k", "none", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a file system")
    yield path
    subprocess.run(["umount", path], check=True)


def test_a_full_disk_leaves_the_old_checkpoint_and_no_rest(small_disk):
    """Wherever it becomes full: with one page left, with two, ..., until there is room for the whole."""
    root = small_disk / "checkpoints"
    save(root, 100)
    before, told = names(root), []
    for num_pages in range(16):
        with (small_disk / "others").open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(4096))
        os.truncate(small_disk / "others", os.path.getsize(small_disk / "others") - 4096 * num_pages)
        try:
            save(root, 120)
        except UserError as error:
            told.append(str(error))
            assert names(root) == before and directory.last_good(root) == (root / "step-00000100", [])
        else:
            break
        (small_disk / "others").unlink()
    assert value_of(directory.last_good(root)[0]) == 120
    places = [root / ".step-00000120.tmp" / name for name in (*FILES, "manifest.json")]
    for place in (*places, root / ".latest.tmp"):
        assert f"{place}: cannot be written: No space left on device" in told
    assert all(line.endswith(": cannot be written: No space left on device") for line in told)
