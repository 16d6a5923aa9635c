import multiprocessing
import os
import signal

import pytest
import torch
from torch.utils.data import Dataset

from hybridpipe.batches import Microbatches
from hybridpipe.loading import loaded


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
    list(loaded(Microbatches(WhoLoads(), 4, 2), lambda sizes: [], 2))
    assert multiprocessing.active_children() == []


def test_what_was_not_foreseen_is_refused():
    minibatches = list(loaded(Microbatches(WhoLoads(), 4, 2), first_of_each, 1))
    with pytest.raises(AssertionError, match=r"microbatch \(0, 0\) was loaded, \(0, 1\) is due"):
        minibatches[0].inputs(1)
