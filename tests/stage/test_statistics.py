"""Averages of normalisation layers' statistics over replicas, against the formula in float64."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from hybridpipe.stage.statistics import Replica, RunningStatistics, agreed, statistics
from tests.stage.helpers import double


def net(**options) -> nn.Sequential:
    torch.manual_seed(0)
    return double(nn.Linear(3, 4), nn.BatchNorm1d(4, **options), nn.Sequential(nn.InstanceNorm1d(2)))


def trained(sizes: list[int], **options) -> tuple[nn.Sequential, RunningStatistics]:
    """Make a replica that has trained on microbatches of these sizes."""
    module = net(**options)
    counted = RunningStatistics([module], [1])
    generator = torch.Generator().manual_seed(sum(sizes))
    for size in sizes:
        module[1](torch.randn(size, 4, dtype=torch.float64, generator=generator))
        counted.num_samples += size
    return module, counted


def agree(replicas: list[tuple[nn.Sequential, RunningStatistics]]) -> None:
    """Average the statistics of all replicas, a thread each, over what every one hands in."""
    barrier = threading.Barrier(len(replicas), timeout=10)
    handed_in = [torch.tensor(0)] * len(replicas)

    def gathered(replica: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        handed_in[replica] = tensor
        barrier.wait()
        found = list(handed_in)
        barrier.wait()
        return found

    def run(replica: int) -> None:
        replicas[replica][1].agree(
            lambda tensor: torch.stack(gathered(replica, tensor)).sum(0),
            lambda tensor: gathered(replica, tensor.clone())[0],
        )

    with ThreadPoolExecutor(len(replicas)) as pool:
        list(pool.map(run, range(len(replicas))))


def test_batches_that_replicas_normalise_together_count_once():
    """Two pairs, of which one has seen two batches and the other one."""
    replicas = [trained(own) for own in ([4, 4], [4, 4], [4], [4])]
    for _, counted in replicas:
        counted._together = [2]
    each = [Replica({**statistics(module)}, counted.num_samples) for module, counted in replicas]
    name = "1.num_batches_tracked"
    assert agreed([name], each, {name: 0}, together=2)[name] == 3
    agree(replicas)
    assert [int(module[1].num_batches_tracked) for module, _ in replicas] == [3] * 4


@pytest.mark.parametrize("options", [{}, {"momentum": None}], ids=["momentum", "cumulative"])
@pytest.mark.parametrize("sizes", [[[4, 4], [4]], [[6], [2, 2, 2], [3]], [[5], []], [[], [2, 7]]])
def test_the_mean_over_the_samples_and_the_sum_of_the_batches(sizes, options):
    """A replica with a short last microbatch, or with none, once counted as much as any other."""
    replicas = [trained(own, **options) for own in sizes]
    numbers = [sum(own) for own in sizes]
    expected = {
        name: sum(n * getattr(module[1], name) for n, (module, _) in zip(numbers, replicas, strict=True))
        / sum(numbers)
        for name in ("running_mean", "running_var")
    }
    each = [Replica({**statistics(module)}, counted.num_samples) for module, counted in replicas]
    saved = agreed(statistics(replicas[0][0]), each, {"1.num_batches_tracked": 0})
    saved = {key: tensor.clone() for key, tensor in saved.items()}
    agree(replicas)
    for module, counted in replicas:
        for name, tensor in expected.items():
            torch.testing.assert_close(getattr(module[1], name), tensor, rtol=0, atol=1e-14)
            assert torch.equal(saved[f"1.{name}"], getattr(module[1], name)), "a checkpoint says the same"
        assert module[1].num_batches_tracked == saved["1.num_batches_tracked"] == sum(map(len, sizes))
        assert counted.num_samples == 0 and counted.num_batches == [
            {"1.num_batches_tracked": sum(map(len, sizes))}
        ]


def test_the_next_agreement_counts_from_the_last_one():
    replicas = [trained([4]), trained([4, 4])]
    agree(replicas)
    for (module, counted), sizes in zip(replicas, ([2, 2], [2]), strict=True):
        for size in sizes:
            module[1](torch.randn(size, 4, dtype=torch.float64))
            counted.num_samples += size
    agree(replicas)
    assert [module[1].num_batches_tracked.item() for module, _ in replicas] == [6, 6]


def test_what_all_have_alike_stays_to_the_bit():
    """Frozen statistics stay exactly equal, although an average of thirds would round them."""
    for samples in (0, 1):
        replicas = [trained([5]) for _ in range(3)]
        before = replicas[0][0].state_dict()["1.running_var"].clone()
        for _, counted in replicas:
            counted.begin_anew()
            counted.num_samples = samples
        agree(replicas)
        assert all(torch.equal(module[1].running_var, before) for module, _ in replicas)


def test_an_older_checkpoint_counts_all_replicas_alike():
    tensors = [
        {"0.running_mean": torch.tensor([x]), "0.num_batches_tracked": torch.tensor(3)} for x in (1.0, 3.0)
    ]
    found = agreed(tensors[0], [Replica(each, 1) for each in tensors], {})
    assert found == {"0.running_mean": torch.tensor([2.0]), "0.num_batches_tracked": torch.tensor(3)}


def test_what_only_some_replicas_have_is_left_out():
    """A layer that a checkpoint of another model holds, say."""
    one, other = torch.ones(1), torch.ones(1)
    first, second = {"0.running_mean": one, "1.running_mean": one}, {"0.running_mean": other}
    assert list(agreed(first, [Replica(first, 1), Replica(second, 1)], {})) == ["0.running_mean"]


def test_replicas_that_saw_nothing_have_what_the_first_has():
    tensors = [{"0.running_mean": torch.tensor([x])} for x in (1.0, 3.0)]
    assert agreed(tensors[0], [Replica(each, 0) for each in tensors], {}) == tensors[0]
