"""What last backwards leave to be made: weights' gradients of several microbatches in one product."""

from dataclasses import replace

from pytest import approx

from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.cost.estimate import estimate
from hybridpipe.planning.cost.formula import GradientBucket, StageCost
from hybridpipe.planning.draw import text
from hybridpipe.planning.profile import JoinedProducts
from hybridpipe.planning.schedules.generators import programs
from hybridpipe.planning.schedules.instructions import AllReduce, Backward, Products, Step
from hybridpipe.planning.simulator.predict import predict, simulate
from tests.planning.helpers import free, layer, model, plan, times

BUCKETS = (GradientBucket(10, 0.4), GradientBucket(10, 1.0))  # of interest to replicas only
COST = StageCost(1.0, 2.0, update_seconds=0.5, buckets=BUCKETS, products_seconds=3.0)


def run(replicas, num_microbatches, costs, cluster=None, **options):
    made = plan(replicas, num_microbatches, **options)
    return made, simulate(programs(made), made, costs, cluster or free(made.num_ranks))


def test_a_stage_that_another_waits_for_makes_its_products_once_it_has_sent():
    """Rank 1 makes its own while rank 0 runs its last backward, and rank 0 in that backward."""
    made, timeline = run([1, 1], 2, [COST, COST])
    assert times(timeline, 1, Backward) == [(2, 4), (5, 7)]
    assert times(timeline, 1, Products) == [(7, 10)]
    assert times(timeline, 1, Step) == [(10, 10.5)]
    assert times(timeline, 0, Backward) == [(4, 6), (7, 12)]
    assert times(timeline, 0, Products) == []
    parts = timeline.parts(made)
    assert parts.backward_seconds == (2 + 5 + 2 + 2 + 3) / 2
    assert timeline.busy_seconds(1) == 2 * 3 + 3 + 0.5


def test_a_rank_of_several_stages_makes_all_products_at_the_end():
    """Stages 1 and 3 are on rank 1, which sends the last gradient of both before it makes any product."""
    _, timeline = run([1, 1], 2, [COST] * 4, schedule="interleaved-1f1b", chunks=2)
    *_, products, _, _ = timeline.events[1]
    assert (products.instruction, products.seconds) == (Products(), approx(6))
    *_, backward, products, _, _ = timeline.events[0]
    assert (products.instruction, products.seconds) == (Products(), approx(3)), "of stage 2"
    assert (backward.instruction, backward.seconds) == (Backward(1, 0), approx(2 + 3)), "and of stage 0"


def test_a_replicated_stage_makes_its_products_in_the_backward_that_its_all_reduce_begins_in():
    _, timeline = run([1, 2], 2, [COST, COST], Cluster.flat(3, 10.0, 0.0))
    assert times(timeline, 1, Backward) == [(2, 7)] and times(timeline, 2, Backward) == [(3, 8)]
    assert times(timeline, 1, Products) == times(timeline, 2, Products) == []
    assert times(timeline, 2, AllReduce) == [(8, 9)], "a bucket of a second; the other was summed before"


def test_of_one_stage_and_of_equal_ones_the_formula_has_what_the_simulator_finds():
    joining = replace(layer(1, 4), joined=JoinedProducts(2.0, 1.0, 0.5, 8))
    for replicas in ([1], [1, 1], [1, 1, 1]):
        made, profile = plan(replicas, 6), model(*[joining] * len(replicas))
        seconds = predict(made, profile, free(3))[1].minibatch_seconds
        assert seconds == approx(estimate(made, profile, free(3)))


def test_a_second_minibatch_takes_as_long_as_the_first():
    made = plan([1, 1], 2)
    twice = {rank: program * 2 for rank, program in programs(made).items()}
    timeline = simulate(twice, made, [COST, COST], free(2))
    once = simulate(programs(made), made, [COST, COST], free(2))
    first, second = [e.seconds for e in timeline.events[1] if type(e.instruction) is Products]
    assert first == second == approx(3)
    assert timeline.busy_seconds(0) == approx(2 * once.busy_seconds(0))


def test_the_drawing_names_them():
    _, timeline = run([1, 1], 2, [COST, COST])
    drawn = text(timeline, width=70)
    assert "+++" in drawn.splitlines()[1] and ", + batched wgrad" in drawn
    (cost,) = [StageCost(1.0, 2.0)]
    assert "joined" not in text(run([1, 1], 2, [cost, cost])[1])
