"""Exchanges: the seconds that a pass takes for what its rank exchanges with others in the middle of it.

Pure. Not known here: the other costs of a pass. Invariant: they are of links, so that no processor's speed
changes them.
"""

from operator import add
from typing import TYPE_CHECKING, Any

from hybridpipe.planning.cluster import Ring
from hybridpipe.planning.layer_parts import SumsProfile

if TYPE_CHECKING:
    from hybridpipe.planning.cost.formula import StageCost

# Exchanges of a module whose experts replicas share: counts go ahead in the forward, then tokens, or their
# gradients, go out and come back.
FORWARD_CALLS, BACKWARD_CALLS = 3, 2


def token_seconds(ring: Ring, num_exchanges: Any, token_bytes: Any, calls: int) -> Any:
    """Return the seconds in which a microbatch's pass exchanges tokens, of one stage or of many.

    Args:
        ring: of `Cluster.all_to_all` over the stage's replicas.
        num_exchanges, token_bytes: of `StageCost`.
        calls: FORWARD_CALLS or BACKWARD_CALLS.
    """
    return calls * num_exchanges * ring.latency_seconds + 2 * token_bytes * ring.seconds_per_byte


def sums_seconds(ring: Ring, sums: SumsProfile) -> tuple[float, float]:
    """Return the seconds of sums in a microbatch's forward, and in its backward (`Cluster.summing`)."""
    latency, per_byte = ring.latency_seconds, ring.seconds_per_byte
    forward = sums.forward * latency + sums.forward_bytes * per_byte
    return forward, sums.backward * latency + sums.backward_bytes * per_byte


def pass_exchanges(cost: "StageCost", tokens: Ring, sums: Ring) -> tuple[float, float]:
    """Return the seconds in which a microbatch's forward, and its backward, exchange with other ranks.

    Args:
        tokens: of `Cluster.all_to_all` over the stage's replicas.
        sums: `Cluster.summing`.
    """
    of_tokens = (
        token_seconds(tokens, cost.num_exchanges, cost.token_bytes, calls)
        for calls in (FORWARD_CALLS, BACKWARD_CALLS)
    )
    forward, backward = map(add, of_tokens, sums_seconds(sums, cost.sums))
    return forward, backward
