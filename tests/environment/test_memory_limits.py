"""Limits of memory, from folders that stand for a machine's `proc` and `sys`."""

import pytest

from hybridpipe.environment.memory_limits import (
    RankMemory,
    Room,
    bytes_for_stages,
    memory_by_rooms,
    resident_bytes,
    rooms,
)

MIB = 2**20


@pytest.fixture
def machine(tmp_path):
    """Return a function that writes files by path, and returns the folder that stands for /."""

    def write(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(f"{text}\n")
        return tmp_path

    return write


def found(root, **env):
    return {(room.origin, room.num_bytes) for room in rooms(root, env)}


def test_the_ram_that_is_free_now_is_all_that_there_is(machine):
    root = machine({"proc/meminfo": "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    8000 kB"})
    assert rooms(root, {}) == [Room("RAM", 8000 * 1024, "machine")]


def test_where_nothing_is_told_nothing_is_limited(tmp_path):
    assert rooms(tmp_path, {}) == []
    assert resident_bytes(tmp_path) == 0
    assert bytes_for_stages(memory_by_rooms([[], []], [7, 8], [0, 0])) is None


def test_each_cgroup_above_the_process_is_a_limit(machine):
    group = "sys/fs/cgroup/slurm"
    root = machine(
        {
            "proc/self/cgroup": "0::/slurm/job/step",
            f"{group}/memory.max": "1000",
            f"{group}/memory.current": "300",
            f"{group}/memory.stat": "anon 5\ninactive_file 100\nactive_file 7",
            f"{group}/job/memory.max": "max",
            f"{group}/job/memory.high": "500",
            f"{group}/job/memory.current": "450",
            f"{group}/job/step/memory.max": "max",
            f"{group}/job/step/memory.current": "450",
        }
    )
    assert found(root) == {("cgroup", 800), ("cgroup", 50)}
    one, other = rooms(root, {})
    assert one.sharers != other.sharers


def test_a_cgroup_that_is_over_its_limit_has_nothing_left(machine):
    group = "sys/fs/cgroup"
    root = machine({"proc/self/cgroup": "0::/", f"{group}/memory.max": "10", f"{group}/memory.current": "12"})
    assert found(root) == {("cgroup", 0)}


def test_cgroups_of_version_1_are_read_too(machine):
    group = "sys/fs/cgroup/memory"
    root = machine(
        {
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/job\n1:cpuset:/job\n0::/",
            f"{group}/memory.limit_in_bytes": "9223372036854771712",
            f"{group}/memory.usage_in_bytes": "5",
            f"{group}/job/memory.limit_in_bytes": "1000",
            f"{group}/job/memory.usage_in_bytes": "600",
            f"{group}/job/memory.stat": "inactive_file 1\ntotal_inactive_file 50",
        }
    )
    assert found(root) == {("cgroup", 450)}


def test_a_container_sees_its_cgroup_at_the_mount_under_whatever_path(machine):
    group = "sys/fs/cgroup"
    root = machine(
        {
            "proc/self/cgroup": "0::/system.slice/docker-1f.scope",
            f"{group}/memory.max": "1000",
            f"{group}/memory.current": "1",
        }
    )
    assert found(root) == {("cgroup", 999)}


def test_slurm_gives_to_a_node_or_to_each_core_in_megabytes(tmp_path):
    of_node = {"SLURM_MEM_PER_NODE": "4000", "SLURMD_NODENAME": "n1"}
    assert rooms(tmp_path, of_node) == [Room("Slurm's --mem", 4000 * MIB, "slurm n1", with_held=True)]
    of_core = {"SLURM_MEM_PER_CPU": "500", "SLURM_CPUS_PER_TASK": "3"}
    assert rooms(tmp_path, of_core) == [Room("Slurm's --mem-per-cpu", 1500 * MIB, with_held=True)]
    assert rooms(tmp_path, {"SLURM_MEM_PER_NODE": "0"}) == []  # all that the node has


def test_limits_of_the_process_count_from_what_it_has_mapped(machine):
    limits = (
        "Limit                     Soft Limit           Hard Limit           Units\n"
        "Max data size             3000000              unlimited            bytes\n"
        "Max address space         unlimited            unlimited            bytes"
    )
    status = "VmSize:\t 9999 kB\nVmData:\t 1000 kB"
    root = machine({"proc/self/limits": limits, "proc/self/status": status})
    assert rooms(root, {}) == [Room("RLIMIT_DATA", 3_000_000 - 1_024_000)]


@pytest.mark.parametrize(
    "rooms, limits",
    [
        ([[Room("RAM", 90, "machine")]] * 3, [110, 120, 30]),  # a third of what is free, and what each has
        ([[Room("given", 90)]] * 3, [170, 180, 90]),
        ([[Room("given", 90, with_held=True)]] * 3, [90, 90, 90]),
        ([[Room("--mem", 260, "node", with_held=True)]] * 3, [110, 120, 30]),  # of 260 they have 170
    ],
)
def test_ranks_share_equally(rooms, limits):
    ranks = memory_by_rooms(rooms, [80, 90, 0], [0, 0, 0])
    assert [rank.limit_bytes for rank in ranks] == limits


def test_ranks_of_two_machines_share_nothing():
    ranks = memory_by_rooms([[Room("RAM", 60, "machine")]] * 3, [0] * 3, [0, 0, 2])
    assert [rank.limit_bytes for rank in ranks] == [30, 30, 60]


def test_the_least_limit_counts():
    large, small = Room("RAM", 100, "machine"), Room("given", 40, with_held=True)
    assert memory_by_rooms([[large, small]], [10], [0]) == [RankMemory(10, 40, "given")]
    assert memory_by_rooms([[small, large]], [10], [0])[0].left_bytes == 30


def test_a_process_beyond_its_limit_has_nothing_for_its_stage():
    [rank] = memory_by_rooms([[Room("given", 40, with_held=True)]], [60], [0])
    assert (rank.limit_bytes, rank.left_bytes) == (40, 0)


@pytest.mark.parametrize(
    "left, told",
    [([115, 115], 100), ([115, 112], 97), ([115, 104], (100, 90)), ([115, 114, 58], (99, 99, 50))],
)
def test_room_that_hardly_differs_is_alike_and_a_reserve_is_kept(left, told):
    assert bytes_for_stages([RankMemory(5, 5 + each, "RAM") for each in left]) == told
