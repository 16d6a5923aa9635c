"""Hostile input to planning: an answer of finite figures or a mistake told in one line, and never a hang."""

import contextlib
import io
import json
import math
import signal
import warnings
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hybridpipe.cli.main import main
from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.graph.pipedream_format import parse_graph
from hybridpipe.planning.profile import LayerProfile, Measurement, ModelProfile
from hybridpipe.planning.request import AUTO
from hybridpipe.planning.schedules.registry import SCHEDULES
from hybridpipe.planning.search.search import NoPlanFits, fits
from tests.planning.helpers import search

SECONDS = 20  # against hanging only
PHASES = (Phase.explicit, Phase.generate)  # shrinking takes minutes, and the case is told without
FUZZ = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=PHASES,
    suppress_health_check=list(HealthCheck),
)

LAYER = {
    "name": "layer",
    "forward_seconds": 0.01,
    "backward_seconds": 0.02,
    "parameter_bytes": 1000,
    "output_bytes": 100,
    "activation_bytes": 300,
    "update_seconds": 0.001,
    "gradient_bytes": 50,
}
PROFILE = {
    "format": "hybridpipe-profile/1",
    "layers": [LAYER] * 3,
    "samples": 4,
    "device": "cpu",
    "dtype": "float32",
    "state_factor": 1.0,
    "others": [{"samples": 8, "layers": [LAYER] * 3}],
    "load": 1,
    "versions": {"torch": "2"},
}
LEVEL = {"name": "node", "ranks": 2, "bandwidth": 1e9, "latency_seconds": 1e-5}
CLUSTER = {
    "format": "hybridpipe-cluster/1",
    "levels": [
        LEVEL,
        LEVEL
        | {
            "ranks": 4,
            "shared_bandwidth": 1e8,
            "allreduce": {"bandwidth": 1e8, "latency_seconds": 1e-4, "fit_error": 0.1},
            "fit_error": 0.1,
        },
    ],
    "memory_bytes": 10**6,
    "relative_speed": [1.0, 1.0, 0.5, 0.5],
    "node_ranks": 2,
    "compute_speeds": [1.0, 0.7],
    "message_seconds": 1e-6,
    "message_seconds_per_byte": 1e-10,
    "wakeup_seconds": [0.0, 1e-6],
    "overlap": 0.8,
}
PLAN = {
    "format": "hybridpipe-plan/1",
    "stages": [
        {"start": 0, "stop": 1, "replicas": 2, "ranks": [0, 1]},
        {"start": 1, "stop": 3, "replicas": 1, "ranks": [3]},
    ],
    "schedule": "1f1b",
    "num_microbatches": 6,
    "num_layers": 3,
    "recompute": False,
    "predicted": {
        "minibatch_seconds": 1.0,
        "samples_per_second": 1.0,
        "bubble_fraction": 0.5,
        "peak_memory_bytes": [1, 1, 1],
    },
}
NUMBERS = [-1, -0.0, 0, 1, 2, 3, 7, 1000, 10**6, 2**31, 2**53 + 1, 2**62, 2**63 - 1, 2**64, 10**400]
NUMBERS += [1e-320, 1e-300, 1e-9, 0.3, 1e15, 1e300, 1.7e308, math.nan, math.inf, -math.inf]
OTHERS: list[Any] = [
    None,
    True,
    "",
    "x\ny",
    "1f1b",
    "gpipe",
    "pipedream",
    "\ud800",
    [],
    {},
    [[]],
    [1, 2, 3, 4],
]
VALUES = st.sampled_from(NUMBERS + OTHERS)


class TookTooLong(AssertionError):
    """Not a mistake of the user."""


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """No hang, and no warning."""

    def stop(*_: object) -> None:
        raise TookTooLong(f"after {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(*arguments: object) -> str | None:
    """A command's output, or None where it told a mistake in one line, or that no plan fits."""
    out, err = io.StringIO(), io.StringIO()
    with watched(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as ended:  # of the parser
            code = ended.code
    if code == 0:
        assert err.getvalue() == ""
        return out.getvalue()
    assert code == 2
    first, *more = err.getvalue().splitlines()
    assert not more or first.startswith("hybridpipe: plan: no plan fits into memory: "), err.getvalue()
    return None


def strictly(text: str) -> Any:
    """JSON without NaN and infinity."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in JSON")

    return json.loads(text, parse_constant=refuse)


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Every container with each of its keys, at any depth."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = [(value, key) for key in keys]
    return found + [slot for key in keys for slot in slots(value[key])]


@st.composite
def mutated(draw: st.DrawFn, *documents: dict[str, Any]) -> list[dict[str, Any]]:
    """The documents with one to three changes in all."""
    changed = [json.loads(json.dumps(document)) for document in documents]
    for _ in range(draw(st.integers(1, 3))):
        document = draw(st.sampled_from(changed))
        if not slots(document):
            continue
        container, key = draw(st.sampled_from(slots(document)))
        match draw(st.sampled_from(["value"] * 6 + ["remove", "add", "nest", "repeat"])):
            case "value":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(st.sampled_from(["", "x\ny", "rank", "stages"]))] = draw(VALUES)
            case "add":
                container.append(draw(VALUES))
            case "nest":
                container[key] = draw(st.sampled_from([[container[key]], {"x": container[key]}]))
            case "repeat" if isinstance(container, list):
                container.append(deepcopy(container[key]))
    return changed


def written(folder: Path, **documents: Any) -> list[str]:
    """Command-line arguments that name the documents' files."""
    arguments = []
    for name, document in documents.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(document))
        arguments += [f"--{name}", str(path)]
    return arguments


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile")


@given(
    documents=mutated(PROFILE, CLUSTER),
    options=st.sampled_from(
        [
            [],
            ["--schedule=gpipe"],
            ["--schedule=pipedream"],
            ["--recompute"],
            ["--zero=auto"],
            ["--zero=2", "--recompute"],
            ["--minibatch=64"],
        ]
    ),
    as_json=st.booleans(),
)
@FUZZ
def test_plan_bears_changed_files(folder, documents, options, as_json):
    arguments = written(folder, profile=documents[0], cluster=documents[1])
    printed = run("plan", *arguments, *options, *["--json"] * as_json)
    if printed is not None and as_json:
        strictly(printed)


@given(
    documents=mutated(PROFILE, CLUSTER, PLAN),
    options=st.sampled_from(
        [[], ["--ranks=8"], ["--bandwidth=1Gbit"], ["--latency=5us"], ["--plot"], ["--trace"]]
    ),
    as_json=st.booleans(),
)
@FUZZ
def test_simulate_bears_changed_files(folder, documents, options, as_json):
    arguments = written(folder, profile=documents[0], cluster=documents[1], plan=documents[2])
    options = [*options, str(folder / "out")] if options in (["--plot"], ["--trace"]) else options
    printed = run("simulate", *arguments, *options, *["--json"] * as_json)
    if printed is not None and as_json:
        strictly(printed)


TEXTS = [
    "0",
    "-1",
    "1",
    "3",
    str(2**31),
    str(2**62),
    "9" * 5000,
    "1e300",
    "1e308",
    "1e400",
    "1e-320",
    "nan",
    "inf",
]
TEXTS += ["", " ", "x\ny", "²", "٣", "100Gbit", "1e308Tbit", "5us", "1e-320ns"]
PLANNED = ["--minibatch", "--microbatch", "--ranks", "--memory"]


@given(
    options=st.dictionaries(st.sampled_from(PLANNED), st.sampled_from(TEXTS), min_size=1),
    schedule=st.sampled_from(SCHEDULES),
)
@FUZZ
def test_plan_bears_absurd_options(folder, options, schedule):
    arguments = written(folder, profile=PROFILE, cluster=CLUSTER)
    given_options = [f"{name}={value}" for name, value in options.items()]
    printed = run("plan", *arguments, *given_options, "--schedule", schedule, "--json")
    if printed is not None:
        strictly(printed)


@given(
    options=st.dictionaries(
        st.sampled_from(["--ranks", "--bandwidth", "--latency"]), st.sampled_from(TEXTS), min_size=1
    )
)
@FUZZ
def test_simulate_bears_absurd_options(folder, options):
    arguments = written(folder, profile=PROFILE, cluster=CLUSTER, plan=PLAN)
    printed = run("simulate", *arguments, *(f"{name}={value}" for name, value in options.items()), "--json")
    if printed is not None:
        strictly(printed)


@given(flat=st.sampled_from(TEXTS), bandwidth=st.sampled_from(TEXTS), latency=st.sampled_from(TEXTS))
@FUZZ
def test_probe_bears_absurd_options(folder, flat, bandwidth, latency):
    out = folder / "flat.json"
    printed = run("probe", f"--flat={flat}", f"--bandwidth={bandwidth}", f"--latency={latency}", "--out", out)
    if printed is not None:
        assert run("plan", *written(folder, profile=PROFILE), "--cluster", out, "--ranks=1") is not None


TIMES = st.sampled_from([0.0, 1e-300, 1e-9, 1e-3, 1.0, 1e9])
SIZES = st.sampled_from([0, 1, 1000, 2**31, 2**62])
FACTORS = st.sampled_from([1e-9, 0.5, 1.0, 1e9, 1e30])
RATES = st.sampled_from([1e-9, 1.0, 1e9, 1e300])


def layers(size: int) -> st.SearchStrategy[tuple[LayerProfile, ...]]:
    layer = st.builds(LayerProfile, st.just("x"), TIMES, TIMES, SIZES, SIZES, SIZES, TIMES, st.none() | SIZES)
    return st.lists(layer, min_size=size, max_size=size).map(tuple)


@st.composite
def profiles(draw: st.DrawFn) -> ModelProfile:
    size = draw(st.integers(1, 5))
    others = (
        (Measurement(draw(st.sampled_from([2, 2**62])), draw(layers(size))),) if draw(st.booleans()) else ()
    )
    return ModelProfile(
        draw(layers(size)),
        1,
        state_factor=draw(st.sampled_from([0.0, 2.0, 1e9])),
        others=others,
        load=draw(st.sampled_from([1, 2**62])),
    )


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    inner, units = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    ranks = inner * units
    shared = draw(st.none() | RATES)
    figures = draw(st.none() | st.builds(Collective, RATES, TIMES))
    gathers = st.none() | st.builds(Collective, RATES, TIMES)
    each = st.lists(SIZES, min_size=ranks, max_size=ranks).map(tuple)
    speeds = st.lists(FACTORS, min_size=ranks, max_size=ranks).map(tuple)
    return Cluster(
        (
            Level("in", inner, draw(RATES), draw(TIMES)),
            Level("out", ranks, draw(RATES), draw(TIMES), shared, figures, all_gather=draw(gathers)),
        ),
        memory_bytes=draw(st.none() | SIZES | each),
        relative_speed=draw(st.none() | speeds),
        node_ranks=draw(st.sampled_from([None, 1, 2, 2**62])),
        compute_speeds=draw(st.none() | st.lists(FACTORS, min_size=1, max_size=3).map(tuple)),
        message_seconds=draw(TIMES),
        message_seconds_per_byte=draw(TIMES),
        wakeup_seconds=draw(st.lists(TIMES, max_size=3).map(tuple)),
        overlap=draw(st.sampled_from([0.0, 0.5, 1.0])),
    )


@given(
    profile=profiles(),
    cluster=clusters(),
    num_microbatches=st.sampled_from([1, 2, 7, 1000, 2**62]),
    schedule=st.sampled_from(SCHEDULES),
    recompute=st.booleans(),
    zero=st.sampled_from([0, AUTO]),
)
@settings(FUZZ, max_examples=15)  # each searches twice
def test_extremes_give_finite_plans(profile, cluster, num_microbatches, schedule, recompute, zero):
    count = 1 if schedule == "pipedream" else num_microbatches
    with watched():
        try:
            found = search(profile, cluster, count, schedule=schedule, recompute=recompute, zero=zero)
        except ValueError as error:
            assert isinstance(error, NoPlanFits) or "\n" not in str(error)
            return
        again = search(profile, cluster, count, schedule=schedule, recompute=recompute, zero=zero)
        assert again == found
        for plan in (found[0].plan, found[-1].plan):
            assert fits(plan, profile if plan.num_microbatches == count else profile.scaled_to(2), cluster)
            predicted = plan.predicted
            assert predicted is not None
            figures = (predicted.minibatch_seconds, predicted.samples_per_second, predicted.bubble_fraction)
            assert all(map(math.isfinite, figures)), figures
        assert math.isfinite(estimate(found[0].plan, profile, cluster))


NODE = (
    "node1 -- Linear(3) -- forward_compute_time=1, backward_compute_time=2, activation_size=3, "
    "parameter_size=4"
)
PIECES = [
    "node1",
    "node2",
    "Input0",
    " -- ",
    "\t",
    "\n",
    "=",
    ",",
    "[1;2]",
    "1e300",
    "nan",
    "-1",
    "forward_compute_time",
]
PIECES += [
    NODE,
    NODE.replace("node1", "node2"),
    "\n\tnode1 -- node2\n",
    "\n\tnode2 -- node1\n",
    "\n\tnode1 -- node1\n",
]


@given(text=st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
@FUZZ
def test_profile_bears_any_graph(folder, text):
    path = folder / "graph.txt"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    run("profile", "--from-pipedream", path, "--out", folder / "graph.json", "--samples=1")


@given(st.text())
@FUZZ
def test_graphs_are_refused_in_one_line(text):
    with watched():
        try:
            parse_graph(text)
        except ValueError as error:
            assert "\n" not in str(error)
