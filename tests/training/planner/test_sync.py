"""A plan runs with the backend of the user, its own, the fastest, or the default, in this order."""

import pytest

from hybridpipe.collectives.backends import Usable
from hybridpipe.comm.mpi import MPI
from hybridpipe.planning.cluster import Cluster
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.training.planner.planner import Planner


def maker(given, wanted="auto", measured=None, missing=()) -> Planner:
    """A plan maker as far as backends go; making a whole one would need as many ranks as the plan."""
    made = Planner.__new__(Planner)
    made._world, made._leads, made._sync, made._given = MPI.COMM_SELF, True, wanted, given
    made._usable = Usable(dict.fromkeys(missing, "it is not there"), on_gpus=False)
    made._cluster = None if measured is None else Cluster(Cluster.flat(2, 1e9, 1e-4).levels, sync=measured)
    return made


def plan(sync=None) -> Plan:
    return Plan((StageSpec(0, 2, 2),), num_microbatches=2, sync=sync)


@pytest.mark.parametrize(
    "of_plan, options, expected, told",
    [
        (None, {}, "horovod", ""),
        (None, {"missing": ["horovod"]}, "mpi", ""),
        (None, {"measured": "mpi"}, "mpi", ""),
        ("torch", {}, "torch", ""),
        ("horovod", {"measured": "mpi"}, "horovod", "predictions are of mpi's sums"),
        ("horovod", {"missing": ["horovod"]}, "mpi", "by mpi instead of horovod, which the plan names"),
        ("horovod", {"wanted": "mpi"}, "mpi", "by mpi instead of horovod, which the plan names"),
    ],
)
def test_the_backend_of_a_plan(capsys, of_plan, options, expected, told):
    given = plan(of_plan)
    assert maker(given, **options).with_sync(given).sync == expected
    assert told in capsys.readouterr().err


def test_a_pipeline_without_replicas_needs_none():
    straight = Plan((StageSpec(0, 1), StageSpec(1, 2)), num_microbatches=2, sync="horovod")
    assert maker(straight, missing=["horovod"]).with_sync(straight).sync is None


def test_plans_that_differ_in_their_backend_only_are_equal():
    assert plan("mpi") == plan("horovod") == plan()
