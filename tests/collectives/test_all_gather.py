"""Weights are gathered into the memory that they have; on a device by way of the host's."""

import torch

from hybridpipe.collectives.all_gather import all_gather


class Pending:
    """A transfer that ends when it is waited for."""

    def __init__(self, words, others):
        self.words, self.others = words, others

    def wait(self, on_slow=None):
        self.words[2:] = self.others


class Replicas:
    """This rank is the first of two; the other one's share is two words."""

    ranks = (0, 1)

    def Iallgather(self, in_place, words):
        return words[0]


class Transport:
    def __init__(self, others):
        self.others = others

    def watch(self, request, buffer, what, ranks):
        assert request is buffer and ranks == (0, 1)
        return Pending(buffer, self.others)


def gathered(weights):
    others = torch.tensor([4.0, 5.0, 6.0, 7.0]).view(torch.int64).numpy()
    return all_gather(Transport(others), Replicas(), weights)


def test_shares_arrive_in_the_weights_themselves():
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    gathered(weights).wait()
    assert weights.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]


class OnDevice(torch.Tensor):
    """A tensor whose `cpu()` is a copy, as a GPU's is."""

    def cpu(self):
        return self.as_subclass(torch.Tensor).clone()


def test_a_devices_weights_are_loaded_once_they_are_there():
    weights = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0]).as_subclass(OnDevice)
    pending = gathered(weights)
    assert weights[4:].tolist() == [0.0] * 4
    pending.wait()
    assert weights.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
