"""Traffic: the bytes that a rank has moved so far, by kind.

Knows the parts that count them; no plan. Invariant: a byte counts once, where it is sent.
"""

from typing import NamedTuple

from hybridpipe.engine.executor import Executor


class Traffic(NamedTuple):
    """Bytes of one rank.

    Args:
        sent: of activations and gradients to other ranks, and of tokens of experts.
        reduced: of gradients handed to an all-reduce or a reduce-scatter.
        gathered: of weights that all-gathers have completed.
        between_groups: of weights to other groups.
    """

    sent: int
    reduced: int
    gathered: int
    between_groups: int


def traffic(executor: Executor) -> Traffic:
    """Return what a rank has moved so far."""
    of_experts = sum(stage.bytes_exchanged for stage in executor.stages)
    of_shared = 0 if executor.shared is None else executor.shared.bytes_sent
    return Traffic(
        sent=sum(each.bytes_sent for each in executor.p2p) + of_experts + of_shared,
        reduced=0 if executor.sync is None else executor.sync.bytes_reduced,
        gathered=0 if executor.shares is None else executor.shares.bytes_gathered,
        between_groups=0 if executor.centre is None else executor.centre.sums.bytes_sent,
    )
