import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridpipe.errors import UserError
from hybridpipe.files import read_cluster, read_plan, read_profile, write_json
from hybridpipe.planning.checks import PREDICTIONS
from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.plan import PassTimes, Plan, Prediction, StageSpec
from hybridpipe.planning.profile import LayerProfile, ModelProfile, SharedParameter
from hybridpipe.planning.schedules.registry import ASYNCHRONOUS, SCHEDULES, TRAITS

READERS: dict[str, Callable[[Path], Any]] = {
    "plan.json": read_plan,
    "profile.json": read_profile,
    "cluster.json": read_cluster,
}

PLAN = """\
{
  "format": "hybridpipe-plan/1",
  "num_layers": 21,
  "schedule": "1f1b",
  "num_microbatches": 16,
  "stages": [
    {"start": 0, "stop": 17, "replicas": 3, "ranks": [0, 1, 2], "recompute": false, "zero": 0, "scatter": false, "experts": false, "tensor": 1, "sync_batchnorm": 1},
    {"start": 17, "stop": 21, "replicas": 1, "ranks": [3], "recompute": true, "zero": 0, "scatter": false, "experts": false, "tensor": 1, "sync_batchnorm": 1}
  ],
  "chunks": 1,
  "vertical_sync": false,
  "prediction": "off",
  "recompute": false,
  "zero": 0,
  "predicted": {"minibatch_seconds": 0.41, "samples_per_second": 620.0, "bubble_fraction": 0.08, "peak_memory_bytes": [1, 1, 1, 1]}
}
"""  # noqa: E501

PROFILE = """\
{
  "format": "hybridpipe-profile/1",
  "layers": [
    {
      "name": "conv",
      "forward_seconds": 0.25,
      "backward_seconds": 0.5,
      "parameter_bytes": 8,
      "output_bytes": 16,
      "activation_bytes": 32,
      "update_seconds": 0.0,
      "gradient_bytes": 12,
      "accumulate_seconds": 0.0625,
      "joined": {"backward_seconds": 0.25, "product_seconds": 0.0625, "microbatch_seconds": 0.125, "microbatches": 4, "kept_bytes": 24}
    }
  ],
  "samples": 8,
  "device": "cpu",
  "dtype": "float32",
  "state_factor": 1.0,
  "copied_factor": 0.0,
  "others": [
    {
      "samples": 4,
      "layers": [
        {
          "name": "conv",
          "forward_seconds": 0.125,
          "backward_seconds": 0.25,
          "parameter_bytes": 8,
          "output_bytes": 8,
          "activation_bytes": 16,
          "update_seconds": 0.0,
          "accumulate_seconds": 0.0
        }
      ],
      "tensor": 1,
      "shared": []
    }
  ],
  "load": 2,
  "shared": [],
  "why_whole": "",
  "versions": {"torch": "2.9.0"},
  "tensor": 1
}
"""  # noqa: E501

CLUSTER = """\
{
  "format": "hybridpipe-cluster/1",
  "levels": [
    {"name": "node", "ranks": 2, "bandwidth": 10000000000.0, "latency_seconds": 1e-06},
    {
      "name": "network",
      "ranks": 4,
      "bandwidth": 1250000000.0,
      "latency_seconds": 5e-05,
      "shared_bandwidth": 1250000000.0,
      "allreduce": {"bandwidth": 1000000.0, "latency_seconds": 0.0001, "fit_error": 0.1, "wait_seconds": 0.5},
      "fit_error": 0.2
    }
  ],
  "memory_bytes": 8589934592,
  "relative_speed": [1.0, 1.0, 0.5, 0.5],
  "node_ranks": 2,
  "compute_speeds": [1.0, 0.75],
  "message_seconds": 8e-05,
  "message_seconds_per_byte": 1e-10,
  "wakeup_seconds": [0.0, 0.001],
  "replicated_speed": 0.9,
  "overlap": 0.5,
  "allreduce_factor": 1.0,
  "waits_for_messages": true,
  "shards": 1
}
"""

GOOD = {"plan.json": PLAN, "profile.json": PROFILE, "cluster.json": CLUSTER}


@pytest.mark.parametrize("name", GOOD)
def test_a_file_is_written_as_it_was_read(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text(GOOD[name])
    value = READERS[name](path)
    write_json(path, value)
    assert path.read_text() == GOOD[name]


def test_a_plan_by_hand_may_leave_out_what_follows_from_the_rest(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text('{"format": "hybridpipe-plan/1", "stages": [{"start": 0, "stop": 4, "replicas": 2}]}')
    assert read_plan(path) == Plan((StageSpec(0, 4, 2, ranks=(0, 1)),))


# Texts that are no document at all: (text, what the line says after the file).
UNREADABLE = [
    (b"", "must be a JSON object, got an empty file"),
    (b" \n", "must be a JSON object, got an empty file"),
    (b"{", "must be JSON: "),
    (b"stages = 3", "must be JSON: "),
    (b"[1, 2]", "must be a JSON object, got [1, 2]"),
    (b"null", "must be a JSON object, got None"),
    (b"\xff\xfe{}", "must be UTF-8 text, got byte 0xff"),
    (b"[" * 100_000, "must be JSON: "),
    (b"1" + b"0" * 5000, "must be JSON: "),
    (b"{}", "format: must be 'hybridpipe-{kind}/1', got none"),
    (b'{"format": 1}', "format: must be 'hybridpipe-{kind}/1', got 1"),
    (b'{"format": "hybridpipe-plan/2"}', "format: must be 'hybridpipe-{kind}/1', got 'hybridpipe-plan/2'"),
]


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content, told", UNREADABLE, ids=lambda value: repr(value)[:24])
def test_unreadable_files(tmp_path: Path, name: str, content: bytes, told: str):
    path = tmp_path / name
    path.write_bytes(content)
    told = told.replace("{kind}", name.removesuffix(".json"))
    assert mistake(READERS[name], path).startswith(f"{path}: {told}")


@pytest.mark.parametrize("name", READERS)
def test_missing_files_and_folders(tmp_path: Path, name: str):
    read = READERS[name]
    assert mistake(read, tmp_path / name) == f"{tmp_path / name}: cannot be read: No such file or directory"
    assert mistake(read, tmp_path) == f"{tmp_path}: cannot be read: Is a directory"


# One field of a good file is given another value: field, value, what the line says after file and field.
ABSENT = object()
BAD: dict[str, list[tuple[str, Any, str]]] = {
    "plan.json": [
        ("stages[1].replicas", -1, "must be an integer >= 1, got -1"),
        ("stages[1].replicas", "4", "must be a valid integer, got '4'"),
        ("stages[1].replicas", True, "must be a valid integer, got True"),
        ("stages[1].replicas", 1.0, "must be a valid integer, got 1.0"),
        ("stages[1].replicas", None, "must be a valid integer, got None"),
        (
            "stages[1].replica",
            1,
            "unknown field (did you mean 'replicas'? allowed: start, stop, replicas, ranks, recompute, zero, "
            "scatter, experts, tensor, sync_batchnorm)",
        ),
        ("stages[1].ranks", [2, 3], "must name replicas = 1 ranks, got 2: [2, 3]"),
        ("stages[1].ranks", 3, "must be a valid array, got 3"),
        ("stages[1].ranks", [-2], "must be an integer >= 0, got -2"),
        ("stages[0].stop", ABSENT, "is required, but missing"),
        ("stages[0].stop", 0, "must be an integer >= 1, got 0"),
        ("weight_lag", 3, "must not be given under 1f1b, got 3: it goes with zero-bubble"),
        ("stages[0].start", -3, "must be an integer >= 0, got -3"),
        ("stages[1].start", 18, "must be 17, where the stage before ends, got 18"),
        ("stages[1].stop", 17, "must be > start = 17, got 17: a stage holds at least one layer"),
        ("stages[1].stop", 2**70, "must be an integer of at most 64 bits, got 1180591620717411303424"),
        ("stages", [], "must hold at least one stage, got none"),
        ("stages", {}, "must be a valid array, got {}"),
        ("stages", ABSENT, "is required, but missing"),
        ("num_layers", -1, "must be an integer >= 1, got -1"),
        ("num_microbatches", 0, "must be an integer >= 1, got 0"),
        ("num_microbatch", 8, "unknown field (did you mean 'num_microbatches'? allowed: "),
        ("schedule", "1b1f", f"must be one of {', '.join(SCHEDULES)}, got '1b1f'"),
        ("schedule", 1, "must be a valid string, got 1"),
        ("predicted", 0.41, "must be an object, got 0.41"),
        (
            "predicted.bubble",
            1,
            "unknown field (allowed: minibatch_seconds, samples_per_second, bubble_fraction, ",
        ),
        ("predicted.bubble_fraction", float("nan"), "must be a finite number, got nan"),
    ],
    "profile.json": [
        ("layers", [], "must hold at least one layer, got none"),
        ("layers[0].name", 3, "must be a valid string, got 3"),
        ("layers[0].forward_seconds", "1", "must be a valid number, got '1'"),
        ("layers[0].forward_seconds", -0.1, "must be a finite number >= 0, got -0.1"),
        ("layers[0].backward_seconds", float("inf"), "must be a finite number, got inf"),
        ("layers[0].backward_seconds", float("nan"), "must be a finite number, got nan"),
        ("layers[0].output_bytes", 16.5, "must be a valid integer, got 16.5"),
        ("layers[0].output_bytes", -1, "must be an integer >= 0, got -1"),
        ("layers[0].ouput_bytes", 1, "unknown field (did you mean 'output_bytes'?)"),
        ("layers[0].parameter_bytes", ABSENT, "is required, but missing"),
        ("samples", 0, "must be an integer >= 1, got 0"),
        ("load", 0, "must be an integer >= 1, got 0"),
        ("shared", 3, "must be a valid array, got 3"),
        ("others[0].layers", [], "must hold the same 1 layers, got 0"),
        ("state_factor", -1, "must be a finite number >= 0, got -1"),
        ("versions.torch", 2.9, "must be a valid string, got 2.9"),
    ],
    "cluster.json": [
        ("levels", [], "must hold at least one level, got none"),
        ("waits_for_messages", "yes", "must be a valid boolean, got 'yes'"),
        ("levels[0].ranks", 0, "must be an integer >= 1, got 0"),
        ("levels[0].bandwidth", 0, "must be a finite number > 0, got 0"),
        ("levels[0].bandwith", 1, "unknown field (did you mean 'bandwidth'? allowed: name, ranks, "),
        ("levels[1].latency_seconds", -1, "must be a finite number >= 0, got -1"),
        ("levels[1].shared_bandwidth", 0, "must be a finite number > 0, got 0"),
        ("levels[1].allreduce.bandwidth", -1, "must be a finite number > 0, got -1"),
        (
            "levels[1].allreduce.speed",
            1,
            "unknown field (allowed: bandwidth, latency_seconds, fit_error, wait_seconds)",
        ),
        ("memory_bytes", "8 GB", "must be a valid integer, got '8 GB'"),
        ("relative_speed", [1.0], "must hold one figure for each of the 4 ranks, got 1"),
        ("memory_bytes", [1, 2], "must hold one figure for each of the 4 ranks, got 2"),
        ("compute_speeds", [], "must hold at least one figure, got none"),
        ("compute_speeds", [1.0, 0.0], "must be a finite number > 0, got 0.0"),
        ("wakeup_seconds", [-1.0], "must be a finite number >= 0, got -1.0"),
        ("wakeup_seconds", 0.001, "must be a valid array, got 0.001"),
        ("overlap", 1.5, "must be a finite number <= 1, got 1.5"),
    ],
}


@pytest.mark.parametrize(
    "name, field, value, told",
    [pytest.param(name, *row, id=f"{name}-{row[0]}-{i}") for name in BAD for i, row in enumerate(BAD[name])],
)
def test_wrong_values(tmp_path: Path, name: str, field: str, value: Any, told: str):
    path = changed(tmp_path / name, field, value)
    assert mistake(READERS[name], path).startswith(f"{path}: {field}: {told}")


@pytest.mark.parametrize(
    "name, field, value, told",
    [
        ("plan.json", "stages[0].ranks", [0, 1, "2"], "stages[0].ranks[2]: must be a valid integer, got '2'"),
        ("plan.json", "stages[0].ranks", [0, 1, 3], "ranks: must hold one place each, got rank 3"),
        ("plan.json", "stages[0].ranks", [], "ranks: must be named for every stage or for none"),
        (
            "profile.json",
            "others[0].samples",
            8,
            "others: must be of different samples or tensor each, got [8, 8]",
        ),
        ("plan.json", "num_layers", 22, "the last stage must stop at num_layers = 22, got 21"),
        (
            "cluster.json",
            "levels[1].ranks",
            5,
            "level 'network' must hold a multiple of the 2 ranks of level",
        ),
    ],
)
def test_values_that_do_not_go_together(tmp_path: Path, name: str, field: str, value: Any, told: str):
    path = changed(tmp_path / name, field, value)
    assert mistake(READERS[name], path).startswith(f"{path}: {told}")


def changed(path: Path, field: str, value: Any) -> Path:
    """The good file of that name but for one field."""
    document = json.loads(GOOD[path.name])
    *parents, name = [int(part) if part.isdigit() else part for part in re.findall(r"\w+", field)]
    table = document
    for part in parents:
        table = table[part]
    if value is ABSENT:
        del table[name]
    else:
        table[name] = value
    path.write_text(json.dumps(document))
    return path


def mistake(read: Callable[[Path], Any], path: Path) -> str:
    with pytest.raises(UserError) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_long_value_is_cut(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN.replace('"1f1b"', json.dumps(["1f1b"] * 1000)))
    assert mistake(read_plan, path).endswith("...")
    assert len(mistake(read_plan, path)) < len(str(path)) + 120


def test_writing_is_all_or_nothing(tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_text(PLAN)
    with pytest.raises(Exception, match="serialize"):
        write_json(path, {"stages": object()})
    assert path.read_text() == PLAN
    with pytest.raises(UserError, match=r"folder/plan\.json: cannot be written: No such file or directory"):
        write_json(tmp_path / "folder" / "plan.json", {})
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="taken: cannot be written: it exists and is no regular file"):
        write_json(tmp_path / "taken", {})
    assert sorted(each.name for each in tmp_path.iterdir()) == ["plan.json", "taken"]


def test_a_diverged_loss_can_be_written(tmp_path: Path):
    write_json(tmp_path / "summary.json", {"loss_last": float("nan"), "path": tmp_path, "ranks": (0, 1)})
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary == {"loss_last": None, "path": str(tmp_path), "ranks": [0, 1]}


counts = st.integers(1, 6)
sizes = st.integers(0, 2**62)
seconds = st.floats(0, 1e9)
rates = st.floats(1e-9, 1e12)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    spans, replicas = draw(st.lists(st.tuples(counts, counts), min_size=1, max_size=5).map(lambda p: zip(*p)))
    num_ranks, edge, stages = sum(replicas), 0, []
    ranks = draw(st.permutations(range(num_ranks)))
    for span, num_replicas in zip(spans, replicas):
        stages.append(StageSpec(edge, edge + span, num_replicas, tuple(ranks[:num_replicas])))
        edge, ranks = edge + span, ranks[num_replicas:]
    memory = st.tuples(*[sizes] * num_ranks)
    predicted = draw(st.none() | st.builds(Prediction, seconds, rates, st.floats(0, 1), memory))
    chunked = len(stages) > 1 and len(set(replicas)) == 1 and draw(st.booleans())
    if chunked:  # the groups hold as many stages again
        stages += [replace(each, start=edge + each.start, stop=edge + each.stop) for each in stages]
    able = [schedule for schedule in SCHEDULES if TRAITS[schedule].interleaves == chunked]
    schedule = draw(st.sampled_from(able))
    times, in_flight = None, draw(st.none() | counts) if schedule == "zero-bubble" else None
    if TRAITS[schedule].placement == "v":
        groups = [each.ranks for each in stages[: len(stages) // 2]]
        stages = [replace(each, ranks=ranks) for each, ranks in zip(stages, groups + groups[::-1])]
        times = draw(st.sampled_from((None, (PassTimes(3, 4, 2, 1),) * len(stages))))
        in_flight = draw(st.none() | counts.map(lambda more: 2 * len(stages) + more))
    synced = schedule == "pipedream" and draw(st.booleans())
    predicts = schedule in ASYNCHRONOUS and not synced and not any(each.zero for each in stages)
    return Plan(
        tuple(stages),
        schedule,
        num_microbatches=1 if schedule == "pipedream" else draw(counts),
        chunks=2 if chunked else 1,
        vertical_sync=synced,
        prediction=draw(st.sampled_from(PREDICTIONS)) if predicts else "off",
        max_in_flight=draw(st.none() | counts) if schedule in ("1f1b", *ASYNCHRONOUS) else None,
        recompute=draw(st.booleans()),
        in_flight=in_flight,
        weight_lag=draw(st.none() | counts) if schedule == "zero-bubble" else None,
        pass_times=times,
        predicted=predicted,
    )


TIED = SharedParameter("0.weight", (0, 1), 0)
layers = st.builds(LayerProfile, st.text(), seconds, seconds, sizes, sizes, sizes, seconds, st.none() | sizes)
profiles = st.builds(
    ModelProfile,
    layers=st.lists(layers, min_size=1, max_size=4).map(tuple),
    samples=counts,
    dtype=st.text(),
    state_factor=seconds,
    versions=st.dictionaries(st.text(), st.text(), max_size=3),
)
profiles |= profiles.map(lambda profile: replace(profile, layers=profile.layers[:1] * 2, shared=(TIED,)))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    levels, num_ranks = [], 1
    for factor in draw(st.lists(counts, min_size=1, max_size=3)):
        num_ranks *= factor
        reduced = draw(st.none() | st.builds(Collective, rates, seconds, st.none() | seconds))
        shared = draw(st.none() | rates)
        levels.append(Level(draw(st.text()), num_ranks, draw(rates), draw(seconds), shared, reduced))
    return Cluster(
        tuple(levels),
        draw(st.none() | sizes | st.tuples(*[sizes] * num_ranks)),
        draw(st.none() | st.tuples(*[rates] * num_ranks)),
        draw(st.none() | counts),
        draw(st.none() | st.lists(rates, min_size=1, max_size=4).map(tuple)),
        draw(seconds),
        draw(seconds),
        draw(st.lists(seconds, max_size=3).map(tuple)),
        draw(rates),
        draw(st.floats(0, 1)),
        waits_for_messages=draw(st.booleans()),
    )


def documents() -> st.SearchStrategy[tuple[str, Any]]:
    named = {"plan.json": plans(), "profile.json": profiles, "cluster.json": clusters()}
    return st.sampled_from(sorted(named)).flatmap(lambda name: st.tuples(st.just(name), named[name]))


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents())
def test_what_is_written_is_read_back(tmp_path: Path, document: tuple[str, Any]):
    name, value = document
    write_json(tmp_path / name, value)
    assert READERS[name](tmp_path / name) == value
    assert next(iter(json.loads((tmp_path / name).read_text()))) == "format"
