"""Memory: where a plan is refused that does not fit, and what a rank's allocator does with its room.

Not known here: how a plan was found. Invariant: a limit that the user gave is kept.
"""

from collections.abc import Sequence

import torch

from hybridpipe.environment import allocator
from hybridpipe.environment.memory_limits import RankMemory
from hybridpipe.errors import UserError
from hybridpipe.health import out_of_memory
from hybridpipe.notices import notices
from hybridpipe.planning.plan import Plan
from hybridpipe.report.memory import misfit, predicted_bytes


def check_room(
    plan: Plan, ranks: Sequence[RankMemory], rank: int, device: torch.device, is_given: bool
) -> RankMemory:
    """Return this rank's memory, once the plan fits all ranks' by its prediction.

    Where it does not fit into what was found, a line says so: the user's plan may be right, and what is
    found may change.

    Args:
        ranks: the memory of each.
        is_given: the limit is the user's.

    Raises:
        UserError: it does not fit into the given memory.
    """
    line = misfit(plan, ranks)
    if line is not None and is_given:
        raise UserError(f"{line}: plan 'auto' looks for one that fits")
    if line is not None and rank == 0:
        notices.tell(line)
    needed = predicted_bytes(plan, rank)
    out_of_memory.expect(ranks[rank], needed)
    if device.type == "cpu":
        allocator.suit(needed, ranks[rank].left_bytes)
    return ranks[rank]
