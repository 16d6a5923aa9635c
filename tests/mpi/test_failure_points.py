"""A fault at every point, each kind of it: the job is over in seconds and tells the cause, nothing is left.

A selection; `pytest -m campaign tests/campaigns/test_faults.py` goes through the whole matrix.
"""

import re

import pytest

from tests.mpi import cutting
from tests.mpi.faulting import Case, run

pytestmark = pytest.mark.alone  # within seconds

CASES = [
    Case("2-1", "1f1b", 1, "load", "raise"),  # a replica of the first stage
    Case("1-2", "1f1b", 2, "forward", "kill"),  # a replica of the last stage
    Case("2-1", "1f1b", 0, "backward", "segv"),  # the peer waits in the all-reduce, the other in a receive
    Case("1-1-1", "1f1b", 1, "send-activation", "exit"),
    Case("1-2", "pipedream", 0, "receive-gradient", "thread"),
    Case("2", "1f1b", 1, "all-reduce", "kill"),  # a single stage
    Case("2-1:mpi", "1f1b", 0, "all-reduce", "raise"),
    Case("2:mpi", "1f1b", 1, "all-reduce", "kill"),
    Case("2:torch", "1f1b", 0, "all-reduce", "raise"),
    Case("2-1:torch", "1f1b", 1, "all-reduce", "kill"),
    Case("1-1-1", "gpipe", 2, "step", "raise"),
    Case("1-2", "pipedream-2bw", 1, "send-gradient", "raise"),
    Case("2-1", "1f1b", 2, "receive-activation", "kill"),
    Case("1-2", "1f1b", 1, "evaluate", "exit"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_job_is_over_and_tells_why(case):
    ended, mistakes = case.run()
    assert not mistakes, f"{mistakes}\n{ended.output}"


ALL_REDUCE = r"rank 1 .* all-reduce of bucket0 \(1 of 1\), \d+ bytes with ranks 0, 1"


@pytest.mark.parametrize(
    "plan, rank, point, waiting",
    [
        # Before its last gradients: at "all-reduce" Horovod may have sent them already.
        *((f"2-1:{sync}", 0, "backward,mb=2", ALL_REDUCE) for sync in ("horovod", "mpi", "torch")),
        (
            "1-1",
            1,
            "forward",
            r"rank 0 .* instruction rg0; waits for: receive from rank 1, tag \d+, 256 bytes",
        ),
    ],
)
def test_a_stopped_rank_ends_the_job_and_is_named(plan, rank, point, waiting):
    """Its own watchdog cannot run; MPI and Horovod would wait for ever."""
    ended = run(plan, "1f1b", f"rank={rank},step=3,point={point},kind=stop", "3")
    assert ended.code not in (0, 124) and ended.seconds < 3 + 10, ended.output
    assert ended.left == [], "SIGKILL ends a stopped process"
    (report,) = ended.reports
    assert re.search(rf"rank {rank} on host \S+ gives no answer: it is stopped by a signal", report)
    assert re.search(waiting, ended.output), ended.output
    assert "in _finish" in ended.output or "in wait_for" in ended.output, "the stacks"


@pytest.mark.parametrize("sync", ["mpi", "torch"])
def test_a_rank_that_stops_before_an_all_gather_is_named(sync):
    """Not the other one, whose wait was once in no report."""
    ended = run(f"2:{sync}", "1f1b", "rank=1,step=3,point=all-gather,kind=stop", "3", env={"ZERO": "1"})
    (report,) = ended.reports
    assert re.search(r"rank 1 on host \S+ gives no answer: it is stopped by a signal", report), ended.output


def test_a_rank_that_does_not_come_back_is_named():
    ended = run("1-1", "1f1b", "rank=1,step=3,mb=2,point=backward,kind=delay,seconds=60", "3")
    assert ended.code not in (0, 124) and ended.seconds < 3 + 10, ended.output
    (report,) = ended.reports
    assert "rank 1 on host" in report
    assert "is alive and waits for no other rank: stage 1, step 3, microbatch 2, instruction B2" in report


@pytest.mark.parametrize(
    "point, kind, told",
    [
        ("send-activation", "badsize", r"rank 0 sent 384 bytes with tag 0 where the plan expects 192"),
        ("send-activation", "badtag", r"from rank 0, tag 6: .*: microbatch 0 instead of 1|"
         r"rank 0 sent a message with tag 6 where the plan expects 0: .* step 3, microbatch 0"),
    ],
)  # fmt: skip
def test_a_message_that_does_not_match_the_plan_is_refused(point, kind, told):
    ended = run("1-1", "1f1b", f"rank=0,step=3,point={point},kind={kind}")
    assert ended.code not in (0, 124) and ended.seconds < 5 and not ended.left, ended.output
    (report,) = ended.reports
    assert "hybridpipe: rank 1 on host" in report and "ProtocolError" in report
    assert re.search(told, report), report


def test_numbers_gone_bad_stop_the_job_where_they_arose():
    """The NaN goes back through all stages; the loss is where it was first seen."""
    ended = run("1-1-1", "1f1b", "rank=1,step=3,mb=1,point=forward,kind=nan")
    assert ended.code not in (0, 124) and ended.seconds < 5 and not ended.left, ended.output
    (report,) = ended.reports
    assert "rank 2 on host" in report
    assert "NotFinite: the loss of step 3, microbatch 1 (stage 2) is not finite: nan" in report


@pytest.mark.parametrize("schedule", ["1f1b", "pipedream"])
def test_what_can_be_lived_with_is(schedule):
    """Delays below the timeout, at every kind of point, and an update that is left out on all ranks alike."""
    points = [(0, "load"), (0, "send-activation"), (0, "receive-gradient"), (1, "all-reduce"), (2, "step")]
    faults = [f"rank={rank},point={point},kind=delay,seconds=0.5" for rank, point in points]
    faults.append("rank=1,step=4,point=forward,kind=nan")
    ended = run("1-2", schedule, ";".join(faults), "3", "skip")
    assert ended.code == 0 and "finite weights: True" in ended.output, ended.output
    assert ended.output.count("injected") == 6
    told = re.findall(r"rank \d: the (\S+) of step \d.*; the update is skipped", ended.output)
    # under 1f1b one rank tells it for all; under pipedream each stage its own
    assert sorted(told) == (["loss"] if schedule == "1f1b" else ["gradient", "loss"]), ended.output


@pytest.mark.netcluster
@pytest.mark.skipif(not cutting.is_possible(), reason="needs root and netcluster")
def test_a_link_that_is_cut_ends_the_job():
    """MPI_Abort alone did not: mpirun waited for the lost host until it was killed."""
    ended = cutting.train_and_cut("h2", "1-1-1", hang_timeout=5)
    assert ended.code not in (0, 124) and ended.seconds < 5 + 10 and not ended.left, ended.output
    assert re.search(r"rank 1 on host h2 gives no answer: .* the link to it is cut", ended.reports[0])


@pytest.mark.netcluster
@pytest.mark.skipif(not cutting.is_possible(), reason="needs root and netcluster")
def test_a_cut_link_of_the_host_that_runs_mpirun_ends_the_job():
    ended = cutting.train_and_cut("h1", "1-1-1", hang_timeout=5)
    assert ended.code not in (0, 124) and ended.seconds < 5 + 10 and not ended.left, ended.output
