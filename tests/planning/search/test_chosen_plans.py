"""The plans of some problems, to the letter, so that no change of what the search looks at goes unseen.

`python -m tests.planning.search.test_chosen_plans` writes chosen_plans.txt anew: where a plan has become
slower, something was lost.
"""

import random
from pathlib import Path

import pytest

from hybridpipe.planning.cluster import Cluster, Collective, Level
from hybridpipe.planning.plan import Plan
from hybridpipe.planning.profile import ModelProfile
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.interleave import interleaved_plans
from tests.planning.helpers import layer, model, partition, search

FILE = Path(__file__).with_name("chosen_plans.txt")
NODES = Cluster(
    (Level("node", 4, 4e9, 1e-5), Level("network", 8, 5e8, 1e-4, 1e9, Collective(4e8, 3e-4))),
    memory_bytes=400_000_000,
    relative_speed=(1.0,) * 6 + (0.7, 1.2),
    node_ranks=4,
    compute_speeds=(1.0, 1.0, 0.9, 0.7),
    message_seconds=1e-4,
    overlap=0.8,
)
ROW = Cluster((Level("node", 8, 4e9, 1e-5), Level("network", 48, 1e9, 1e-4, 2e9)))


def network(num_layers: int) -> ModelProfile:
    """Outputs shrink and weights grow from front to back."""
    draw = random.Random(num_layers)
    return model(
        *(
            layer(
                draw.uniform(0.002, 0.01),
                draw.uniform(0.004, 0.02),
                parameters=4 * int(10 ** (4 + 3 * i / num_layers + draw.random())),
                output=4 * int(10 ** (6 - 2 * i / num_layers + draw.random())),
                activation=4 * int(10 ** (5.5 + draw.random())),
                update=draw.uniform(0.0005, 0.002),
            )
            for i in range(num_layers)
        ),
        samples=4,
        state_factor=1.0,
    )


def told(plan: Plan, *words: str) -> str:
    stages = " ".join(f"{stage.stop}:{','.join(map(str, stage.ranks))}" for stage in plan.stages)
    seconds = f" {plan.predicted.minibatch_seconds:.6g} s" if plan.predicted else ""
    return " ".join((*words, plan.schedule, stages)) + seconds


def of_search(schedule: str, recompute: bool = False) -> list[str]:
    size = 1 if schedule == "pipedream" else 12
    found = search(network(9), NODES, size, schedule=schedule, recompute=recompute)
    return [told(candidate.plan, candidate.origin) for candidate in found]


def of_a_long_line(schedule: str) -> list[str]:
    size = 1 if schedule == "pipedream" else 64
    return [told(plan) for plan in partition(network(60), ROW, num_microbatches=size, schedule=schedule)[:8]]


def of_groups() -> list[str]:
    request = PlanRequest("interleaved-1f1b")
    return [told(plan) for plan in interleaved_plans(network(24), ROW, 16, request, range(16))[:12]]


CHOSEN = {
    "search 1f1b": lambda: of_search("1f1b", recompute=True),
    "search zero-bubble": lambda: of_search("zero-bubble"),
    "search interleaved-1f1b": lambda: of_search("interleaved-1f1b"),
    "search pipedream": lambda: of_search("pipedream"),
    "search pipedream-2bw": lambda: of_search("pipedream-2bw"),
    "line 1f1b": lambda: of_a_long_line("1f1b"),
    "line pipedream": lambda: of_a_long_line("pipedream"),
    "groups": of_groups,
}


@pytest.mark.parametrize("name", CHOSEN)
def test_the_same_plans_are_chosen(name):
    sections = dict(section.split("\n", 1) for section in FILE.read_text().split("== ")[1:])
    assert CHOSEN[name]() == sections[name].splitlines()


if __name__ == "__main__":
    FILE.write_text("".join(f"== {name}\n" + "\n".join(chosen()) + "\n" for name, chosen in CHOSEN.items()))
