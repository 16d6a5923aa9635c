"""A dense stage's gradients went back to the kernel and were faulted in again with every microbatch."""

import subprocess
import sys

PROGRAM = """
import resource, torch
from hybridpipe.runtime.allocator import keep_freed_memory

def faults(repeats):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(repeats):
        several = [torch.ones(2**20) for _ in range(4)]  # 4 MB each, freed together
        del several
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

if {keep}:
    keep_freed_memory()
faults(5)
print(faults(20))
"""


def faults(keep: bool) -> int:
    program = [sys.executable, "-c", PROGRAM.format(keep=keep)]
    return int(subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stdout)


def test_freed_memory_is_used_again():
    assert faults(keep=True) < 1000 < faults(keep=False), "4 KB pages; 20 times 16 MB are 81920 of them"
