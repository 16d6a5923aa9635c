"""Asked to stop in whatever phase: one agreed step, a whole checkpoint, exit code 75, and nothing is lost.

Each chain is one training, stopped once in every phase; each job goes on where the one before has stopped.
The signal (always two of them, to one rank) comes at a named point, so no timing is involved.
"""

import json

import pytest

from hybridpipe.checkpoint import directory
from hybridpipe.checkpoint.names import LOCK
from tests.mpi.output import own_lines

# On 2-1, ranks 0 and 1 share the first stage: while one of them is at the point, the others wait in a receive
# or in an all-reduce.
SYNCHRONOUS = [
    "start",
    "rank=0,step=1,point=forward,kind=usr1",
    "rank=1,step=5,point=all-reduce,kind=term",
    "rank=2,point=evaluate,kind=usr1",
    "rank=1,point=save-shard,kind=term",
]
ASYNCHRONOUS = [
    "rank=1,step=0,point=receive-activation,kind=term",  # and stops with minibatches in flight
    "rank=0,step=14,point=receive-gradient,kind=usr1",
    "rank=1,step=23,point=step,kind=usr1",  # in the last minibatch of an epoch
    "rank=0,point=evaluate,kind=term",
    "rank=0,point=save-manifest,kind=usr1",
]


@pytest.mark.timeout(300)  # six jobs, which take 5 s each on two idle cores
@pytest.mark.parametrize(
    "shape, schedule, chain",
    [("2-1", "1f1b", SYNCHRONOUS), ("1-1", "pipedream", ASYNCHRONOUS)],
    ids=["2-1-1f1b", "1-1-pipedream"],
)
def test_stopped_in_every_phase_a_training_ends_as_if_never_asked(job, tmp_path, shape, schedule, chain):
    ranks = sum(map(int, shape.split("-")))
    checkpoints, before = tmp_path / "checkpoints", -1
    for i, phase in enumerate(chain):
        told = tmp_path / f"told-{i}"
        told.mkdir()
        env = {"HYBRIDPIPE_OUTCOMES": str(told), "NUM_WORKERS": str(i % 2)}
        if phase != "start":
            env["HYBRIDPIPE_FAULT"] = phase
        words = [str(checkpoints), shape, schedule, *(["start"] if phase == "start" else [])]
        done = job(ranks, "preempted.py", *words, fails=True, env=env)
        assert done.returncode == 75, f"{phase}\n{done.stdout}"
        ends = [json.loads(path.read_text()) for path in told.glob("rank-*.json")]
        assert [end["code"] for end in ends] == [75] * ranks, done.stdout
        (step,) = {end["step"] for end in ends}
        stopped = [line for line in own_lines(done.stdout) if line.startswith("hybridpipe: stopped")]
        assert len(stopped) == 1, done.stdout
        if phase == "start":
            assert step == 0 and "with nothing to save" in done.stdout
            assert {each.name for each in checkpoints.iterdir()} == {LOCK}  # the folder was claimed
        else:
            assert directory.step_of(directory.last_good(checkpoints)[0]) == step, done.stdout
        assert step >= before, f"{phase}: less than before\n{done.stdout}"
        before = step
        print(phase, "stopped at", step)
    done = job(ranks, "preempted.py", str(checkpoints), shape, schedule, "last")
    assert "as undisturbed" in done.stdout
