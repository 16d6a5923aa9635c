"""Models of any class under every kind of plan train what the user's own forward does in one process."""

import pytest

from tests import zoo

SYNCHRONOUS, ASYNCHRONOUS = "0,1,2,3,4,5,6,7", "8,9,10,11"  # of any_model.py's KINDS
IN_A_V = "12,13,14,15"
GROUPS = [  # the models of one job need the same libraries
    ("1,4", ["gpt2", "t5"]),
    (IN_A_V, ["gpt2"]),
    ("0,8", ["gpt2_padded", "llama"]),
    ("2,9", ["bert", "vit"]),
    ("3,6,8", ["resnet50"]),
    ("3,6,8", ["batchnorm"]),
    ("0,9", ["densenet121"]),
    ("0,9", ["convnext"]),
    ("0,10", ["unet", "in_place"]),
    ("1,8,11", ["dlrm", "lstm", "autocast"]),
]


def name_of(numbers: str, names: list[str]) -> str:
    return "-".join(["v"] * (numbers == IN_A_V) + names)


@pytest.mark.parametrize("numbers", [SYNCHRONOUS[:7], SYNCHRONOUS[8:], IN_A_V])
def test_a_forward_with_everything(job, numbers):
    done = job(4, "any_model.py", numbers, "everything", timeout_seconds=240)
    assert done.stdout.count(": within") == len(numbers.split(",")), done.stdout


def test_a_derivative_in_the_forward(job):
    done = job(2, "any_model.py", "5,7,11", "forces")
    assert done.stdout.count(": within") == 3, done.stdout


def test_asynchronous_schedules_train_what_their_formulas_say_or_refuse(job):
    done = job(4, "any_model.py", ASYNCHRONOUS, "unshared", "everything", timeout_seconds=240)
    assert done.stdout.count(": within") == done.stdout.count(": refused") == 4, done.stdout


@pytest.mark.parametrize(
    "numbers, names",
    [
        pytest.param(
            *group,
            marks=zoo.needs(*group[1]),
            id=name_of(*group),
        )
        for group in GROUPS
    ],
)
def test_real_models(job, numbers, names):
    """All train, but for those under asynchronous schedules whose stages would share a parameter."""
    done = job(4, "any_model.py", numbers, *names, timeout_seconds=300)
    asked = numbers.split(",")
    refused = len(zoo.TIED.intersection(names)) * len({*asked}.intersection(ASYNCHRONOUS.split(",")))
    assert done.stdout.count(": refused") == refused, done.stdout
    assert done.stdout.count(": within") == len(asked) * len(names) - refused, done.stdout
