from dataclasses import replace

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec, Variant
from hybridpipe.planning.request import PlanRequest
from hybridpipe.planning.search.problem import Problem
from hybridpipe.planning.search.refine import MAX_EXPANDED, NUM_TRIED, neighbours, refine, run_otherwise
from tests.planning.helpers import layer, model

PROFILE = model(layer(output=9), layer(output=1), layer(output=5), layer(output=7), layer(), layer())


def problem() -> Problem:
    return Problem(PROFILE, Cluster.flat(4, 1e9, 0.0), 8, 4, PlanRequest())


def plan(*stages: tuple[int, int]) -> Plan:
    first, start, made = 0, 0, []
    for stop, replicas in stages:
        made.append(StageSpec(start, stop, replicas, tuple(range(first, first + replicas))))
        first, start = first + replicas, stop
    return Plan(tuple(made), num_microbatches=8)


def told(plans) -> set[str]:
    return {" ".join(f"{stage.stop}:{stage.replicas}" for stage in plan.stages) for plan in plans}


def test_the_neighbours_of_a_plan():
    """One rank is idle. Cuts move by one layer, and to the cheapest edge two or three layers away."""
    assert told(neighbours(plan((3, 2), (6, 1)), problem())) == {
        *("2:2 6:1", "4:2 6:1", "5:2 6:1", "1:2 6:1"),  # another cut
        *("3:1 6:2", "3:1 6:1", "3:3 6:1", "3:2 6:2"),  # a rank moved, left out, or used
        "6:3",  # one stage less
        "2:1 3:1 6:1",  # one stage more, cut where little is sent
        *("2:2 3:1 6:1", "2:1 3:2 6:1", "3:2 5:1 6:1"),  # with the idle rank
    }


def test_a_stage_is_cut_in_each_third_of_it():
    profile = model(*(layer(output=output) for output in (9, 4, 9, 9, 3, 9, 5, 9, 9)))
    whole = replace(plan((9, 2)), stages=(StageSpec(0, 9, 2, (0, 1)),))
    found = told(neighbours(whole, Problem(profile, Cluster.flat(5, 1e9, 0.0), 8, 5, PlanRequest())))
    halves = {f"{cut}:1 9:1" for cut in (2, 5, 7)}
    beside_idle = {f"{cut}:2 9:2" for cut in (2, 5, 7)}
    assert found == halves | beside_idle | {"9:1", "9:3"}
    filled = replace(whole, schedule="zero-bubble")  # says itself how many are in flight
    beside_none = told(neighbours(filled, Problem(profile, Cluster.flat(5, 1e9, 0.0), 8, 5, PlanRequest())))
    assert beside_none == halves | {"9:1", "9:3"}


def test_the_best_is_followed_and_little_is_simulated():
    """The simulated time is the distance of the cut from layer 1, so cuts move there step by step."""
    simulated = {plan((5, 2), (6, 2)): 10.4}
    tried = []

    def simulate(each: Plan, limit: float) -> float:
        tried.append(each)
        return 10 + abs(each.stages[0].stop - 1) / 10 + (each.num_ranks < 4) + abs(each.num_stages - 2)

    refine(simulated, problem(), lambda each: simulate(each, 0.0) and 10.0, simulate)
    assert min(simulated, key=simulated.get).stages[0].stop == 1
    assert len(simulated) <= 1 + MAX_EXPANDED * NUM_TRIED


def test_neighbours_that_are_expected_to_be_slow_are_not_simulated():
    first = plan((3, 2), (6, 2))
    simulated = {first: 1.0}
    refine(simulated, problem(), lambda each: 1.0 if each == first else 2.0, lambda *_: 1 / 0)
    assert simulated == {first: 1.0}


def test_neighbours_that_do_not_fit_are_not_simulated():
    heavy = replace(PROFILE, layers=tuple(replace(each, parameter_bytes=100) for each in PROFILE.layers))
    tight = replace(problem(), profile=heavy, cluster=replace(problem().cluster, memory_bytes=10))
    simulated = {plan((3, 2), (6, 2)): 1.0}
    refine(simulated, tight, lambda _: 1.0, lambda *_: 1 / 0)
    assert len(simulated) == 1


def recomputing(each: Plan) -> str:
    return "".join("-R"[stage.recompute] for stage in each.stages)


def test_recomputation_moves_to_where_it_is_needed():
    """Of two stages the first keeps two microbatches; with one layer less it need not recompute."""
    kept = replace(PROFILE, layers=tuple(replace(each, activation_bytes=100) for each in PROFILE.layers))
    limited = replace(problem().cluster, memory_bytes=800)
    tight = replace(problem(), profile=kept, cluster=limited, request=PlanRequest(recompute=True))
    here = tight.fitted(plan((4, 1), (6, 1)))
    assert recomputing(here) == "R-"
    near = {told([each]).pop(): recomputing(each) for each in neighbours(here, tight)}
    assert near["3:1 6:1"] == "--" and near["5:1 6:1"] == "R-" and near["6:2"] == "-"


def test_stages_of_one_rank_are_run_otherwise():
    """Each of two ranks holds two stages; one of the four does not fit without recomputation."""
    stages = tuple(StageSpec(a, b, 1, (s % 2,)) for s, (a, b) in enumerate([(0, 1), (1, 2), (2, 4), (4, 6)]))
    chunked = Plan(stages, "interleaved-1f1b", 8, chunks=2).running([Variant(True), *[Variant()] * 3])
    free = replace(problem(), request=PlanRequest("interleaved-1f1b", recompute=True))
    assert not list(run_otherwise(chunked, free))
    roomy = replace(free, cluster=replace(free.cluster, memory_bytes=10**6))
    assert {recomputing(each) for each in run_otherwise(chunked, roomy)} == {
        *("----", "RR--", "R-R-", "R--R"),
    }
