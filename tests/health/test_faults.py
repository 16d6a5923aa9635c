"""What HYBRIDPIPE_FAULT may say; tests/mpi lets it happen."""

import subprocess
import sys

import pytest

from hybridpipe.errors import UserError
from hybridpipe.health import faults


@pytest.fixture
def ask(monkeypatch):
    """`ask("point=...")`: from now on these faults are asked for."""

    def asked(text: str, **environment: str) -> None:
        monkeypatch.setattr(
            faults, "_faults", faults.from_environment({faults.VARIABLE: text, **environment})
        )

    return asked


def test_a_fault_is_tied_to_a_point_a_step_and_a_microbatch(ask):
    ask("rank=0,step=3,mb=2,point=step,kind=nan")
    assert faults.at("forward", step=3, microbatch=2) is None
    assert faults.at("step", step=2, microbatch=2) is None
    assert faults.at("step", step=3, microbatch=1) is None
    assert faults.at("step", step=3, microbatch=2) == "nan"


def test_a_fault_happens_once(ask):
    ask("point=load,kind=raise")
    with pytest.raises(faults.InjectedFault, match="injected raise at load, step 5, microbatch 1"):
        faults.at("load", step=5, microbatch=1)
    assert faults.at("load", step=5, microbatch=1) is None and not faults.any_left()


def test_other_ranks_and_other_attempts_are_spared(ask):
    ask("rank=7,point=load,kind=raise;point=load,kind=raise,attempt=1")
    assert faults.at("load") is None
    ask("rank=7,point=load,kind=raise;point=load,kind=exit,attempt=1", HYBRIDPIPE_ATTEMPT="1")
    with pytest.raises(SystemExit):
        faults.at("load")


@pytest.mark.parametrize(
    "text, told",
    [
        ("step=1", "must say point=..., one of load,"),
        ("point=load", "must say kind=..., one of raise,"),
        ("point=forwrd,kind=kill", "got 'forwrd' (did you mean 'forward'?)"),
        ("point=load,kind=kil", "kind must be one of raise, exit, thread, kill"),
        ("point=load,kind=kill,rank=-1", "rank must be an integer >= 0, got '-1'"),
        ("point=load,kind=delay,seconds=nan", "seconds must be a number in [0, 3600), got 'nan'"),
        ("point=load,kind=badsize", "kind=badsize goes with point=send-activation|send-gradient, got load"),
        ("when=now", "unknown 'when' (allowed: rank, step, mb, attempt, point, kind, seconds)"),
    ],
)
def test_a_mistake_is_told_in_one_line(text, told):
    with pytest.raises(UserError) as refused:
        faults.parse(text)
    assert told in str(refused.value) and str(refused.value).startswith("HYBRIDPIPE_FAULT: ")
    assert "\n" not in str(refused.value)


def test_the_points_of_saving_need_neither_torch_nor_mpi():
    probe = "import sys; from hybridpipe.health import faults; print({'torch', 'mpi4py'} & {*sys.modules})"
    assert subprocess.check_output([sys.executable, "-c", probe], text=True) == "set()\n"
