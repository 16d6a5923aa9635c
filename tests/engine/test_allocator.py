"""A dense stage's gradients went back to the kernel and were faulted in again with every microbatch.

Without `keep_freed_memory`, this program counted 490880 faults for blocks of 24 MiB in two runs of three, and
none in the third: it depends on where the heap happens to end. Blocks above 32 MiB, the largest threshold
that glibc accepts, went back each time: 20 times 4 of 64 MiB are 1310720 pages.
"""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, torch
from hybridpipe.engine.allocator import keep_freed_memory

def faults(repeats):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repeats):
        several = [torch.ones({mebibytes} * 2**18) for _ in range(4)]  # freed together
        del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

keep_freed_memory()
faults(5)
print(faults(20))
"""


@pytest.mark.parametrize("mebibytes", [24, 64])
def test_freed_memory_is_used_again(mebibytes):
    program = PROGRAM.format(mebibytes=mebibytes)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert int(done.stdout) < 1000
