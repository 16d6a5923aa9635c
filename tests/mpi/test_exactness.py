"""Any plan trains what one process would: the claim that everything else rests on."""

import pytest

from hybridpipe.planning.schedules.registry import SYNCHRONOUS, TRAITS
from tests.mpi.output import own_lines

# Two ways where a schedule splits the backward, as in exactness.py.
WAYS = [(TRAITS[each], way) for each in SYNCHRONOUS for way in range(1 + TRAITS[each].splits_backward)]
OTHERS = [traits for traits, _ in WAYS if not traits.interleaves]
IN_A_LOOP = [traits for traits, _ in WAYS if traits.interleaves and traits.placement == "loop"]
IN_A_V = [traits for traits, _ in WAYS if traits.placement == "v"]
OPTIMIZERS = 2


@pytest.mark.parametrize(
    "ranks, updates, plans",
    [
        (4, 20, ["4", "2-2", "3-1", "1-3", "1-2-1", "1-1-1-1"]),
        (3, 20, ["2-1", "1-2"]),
        (8, 20, ["3-4-1"]),
        (4, 4, ["2-1", "1"]),  # ranks that the plan leaves unused
    ],
)
def test_parameters_and_losses_are_those_of_one_process(job, ranks, updates, plans):
    done = job(ranks, "exactness.py", str(updates), *plans)
    assert done.stdout.count("parameters within") == len(plans) * len(OTHERS) * OPTIMIZERS


def test_several_stages_on_a_rank(job):
    done = job(4, "exactness.py", "20", "1-1x2", "2-2x3", "1-1-1x2")
    wanted = 3 * len(IN_A_LOOP) + 2 * len(IN_A_V)
    assert done.stdout.count("parameters within") == wanted * OPTIMIZERS


@pytest.mark.parametrize("plans", [["1-1", "1-1-1-1", "2-1", "1-2"], ["3-1", "2-2", "1-2-1"]], ids=" ".join)
def test_asynchronous_schedules_train_what_their_formulas_say(job, plans):
    done = job(4, "asynchronous.py", *plans)
    assert done.stdout.count("parameters within") == len(plans) * 3 * 2  # rules, optimizers


def test_several_optimizers_under_every_schedule(job):
    """Muon for matrices and AdamW for the rest: stages have both, one of them, or neither."""
    plans = ["1-1-1-1", "3-1"]
    done = job(4, "exactness.py", "4", "--muon", *plans, "2-2x2", timeout_seconds=200)
    wanted = len(plans) * len(OTHERS) + len(IN_A_LOOP) + len(IN_A_V)
    assert done.stdout.count("parameters within") == wanted
    done = job(4, "asynchronous.py", "--muon", "1-1-1-1", "2-2", timeout_seconds=200)
    assert done.stdout.count("parameters within") == 2 * 3  # rules


def test_schedulers_and_delay_warm_up_of_asynchronous_schedules(job):
    plans = ["1-1-1-1", "1-2", "2-1-1"]
    done = job(4, "asynchronous.py", "--rates", *plans)
    assert done.stdout.count("parameters within") == len(plans) * 3


@pytest.mark.parametrize("ranks, plans", [(2, ["1-1", "2"]), (3, ["1-1-1"]), (3, ["2-1", "1-2"])], ids=str)
def test_predicted_weights_train_what_their_formula_says(job, ranks, plans):
    done = job(ranks, "asynchronous.py", "--predict", *plans)
    assert done.stdout.count("parameters within") == len(plans) * 2 * OPTIMIZERS  # schedules


def test_losses_with_weights(job):
    """Loss, history, evaluation and clipped updates are those of one process's mean over all tokens."""
    done = job(3, "weighted.py", "1-1", "2-1", "1-2")
    assert done.stdout.count("parameters within") == 3 * 2


def test_replicas_whose_losses_are_of_two_kinds_are_refused_once(job):
    done = job(3, "weighted.py", "--both", fails=True)
    (line,) = own_lines(done.stdout)
    assert "loss must return the same kind for every microbatch" in line


@pytest.mark.parametrize("policy", ["stop", "skip"])
def test_a_minibatch_without_weight(job, policy):
    done = job(3, "weighted.py", "--empty", policy, fails=policy == "stop")
    told = "the loss of step 0 (stage 1) is not finite: nan, since the weights that it returned add up to 0"
    lines = own_lines(done.stdout)
    assert len(lines) == 1 and told in lines[0], done.stdout
    assert done.stdout.count("the weights are finite") == (0 if policy == "stop" else 3)


def test_clipping_schedulers_and_no_sync(job):
    plans = ["1-1", "2-1", "1-2", "3", "1-1x2"]
    done = job(3, "updates.py", *plans)
    assert done.stdout.count("parameters within") == (4 * 3 + 1) * 2
