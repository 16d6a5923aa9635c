"""Start: the light `torch._dynamo` of tests does what eager optimizers need, and becomes the real one."""

import subprocess
import sys

import pytest

from tests.thinned import rare

UPDATE = """
import sys, torch
weight = torch.nn.Parameter(torch.ones(2))
torch.optim.SGD([weight], lr=0.1).step()
assert "torch._dynamo.config" not in sys.modules
"""


@pytest.mark.parametrize(
    "wanted",
    [
        "import torch._dynamo.config as config; assert config is torch._dynamo.config",
        rare("from torch._dynamo import config"),
        rare("config = torch._dynamo.config"),
        "config = sys.modules; assert torch.compile(lambda x: x + 1, backend='eager')(weight)[0] == 2",
    ],
)
def test_an_update_needs_no_compiler_and_who_needs_it_gets_it(wanted):
    program = f"{UPDATE}\n{wanted}\nassert config and 'torch._dynamo.config' in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
