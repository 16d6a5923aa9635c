"""A backend that cannot be used is refused with what helps; `auto` takes what suits the device."""

import pytest
import torch

from hybridpipe.collectives.backends import suited
from hybridpipe.errors import UserError

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    "device, missing, expected",
    [
        (CPU, [], ["horovod", "mpi"]),
        (CPU, ["horovod"], ["mpi"]),
        (GPU, [], ["horovod", "torch"]),
        (GPU, ["horovod"], ["torch"]),
        (GPU, ["horovod", "torch"], ["mpi"]),
    ],
)
def test_auto(device, missing, expected):
    assert suited(dict.fromkeys(missing, "it is not there"), device, "auto") == expected


def test_the_wanted_one_or_none():
    assert suited({}, CPU, "torch") == ["torch"]
    with pytest.raises(UserError, match=r"^sync 'horovod' cannot be used: Horovod is not installed"):
        suited({"horovod": "Horovod is not installed: hybridpipe setup"}, CPU, "horovod")
