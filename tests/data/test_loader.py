import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import Dataset

from hybridpipe.data.batches import Microbatches
from hybridpipe.data.loader import loaded


class WhoLoads(Dataset):
    """A sample is its number and the process that loads it, which is asked to stop meanwhile, as jobs are."""

    def __len__(self):
        return 7

    def __getitem__(self, index):
        if os.getpid() != self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGUSR1)
        return torch.tensor([index, os.getpid()]), index

    rank = os.getpid()


def every(sizes):
    return [(i, b) for i, size in enumerate(sizes) for b in range(size)]


def first_of_each(sizes):
    return [(i, 0) for i in range(len(sizes))]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("loads", [every, first_of_each], ids=lambda loads: loads.__name__)
def test_processes_load_what_the_rank_will_ask_for_until_it_is_done(num_workers, loads):
    microbatches = Microbatches(WhoLoads(), 4, 2)
    asked, seen, processes = loads(microbatches.counts), [], set()
    for i, minibatch in enumerate(loaded(microbatches, loads, num_workers)):
        for b in range(len(minibatch.sizes)):
            if (i, b) in asked:
                inputs = minibatch.inputs(b)
                assert torch.equal(minibatch.targets(b), inputs[:, 0])
                seen.append(inputs[:, 0].tolist())
                processes |= set(inputs[:, 1].tolist())
    assert seen == [[0, 1], [2, 3], [4, 5], [6]] if loads is every else [[0, 1], [4, 5]]
    assert len(processes) == max(num_workers, 1) and (os.getpid() in processes) == (num_workers == 0)
    del minibatch
    assert multiprocessing.active_children() == []


def test_who_needs_nothing_starts_no_process():
    kept = list(loaded(Microbatches(WhoLoads(), 4, 2), lambda sizes: [], 2))
    assert multiprocessing.active_children() == [] and len(kept) == 2


class Stuck(Dataset):
    """As where a file system does not answer."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        time.sleep(1000)


def test_the_rank_can_end_a_process_that_is_stuck():
    kept = list(loaded(Microbatches(Stuck(), 1, 1), every, 1))
    (process,) = multiprocessing.active_children()
    process.terminate()
    process.join(timeout=30)
    assert process.exitcode == 0 and kept


FAILING = """
from hybridpipe.data.batches import Microbatches
from hybridpipe.data.loader import loaded

class Damaged:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        raise ValueError("damaged")

minibatches = list(loaded(Microbatches(Damaged(), 4, 2), lambda sizes: [(i, 0) for i in range(5)], 2))
minibatches[0].inputs(0)
"""


def test_an_error_that_still_refers_to_the_processes_does_not_keep_them():
    done = subprocess.run([sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: damaged"), done.stderr


def test_what_was_not_foreseen_is_refused():
    minibatches = list(loaded(Microbatches(WhoLoads(), 4, 2), first_of_each, 1))
    with pytest.raises(AssertionError, match=r"microbatch \(0, 0\) was loaded, \(0, 1\) is due"):
        minibatches[0].inputs(1)
