"""Each shard of a stage gets each message once, from the rank that it sends to on the way back."""

from collections import Counter
from itertools import product

import pytest

from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.planning.routes import pairs_over, source_of, targets_of


@pytest.mark.parametrize("here, there", [*product([1, 2, 3, 4], [1, 2, 4])])
@pytest.mark.parametrize("replicas", [(1, 1), (2, 1), (2, 3)])
def test_every_shard_gets_each_message_once(replicas, here, there):
    stages = StageSpec(0, 1, replicas[0], tensor=here), StageSpec(1, 2, replicas[1], tensor=there)
    plan = Plan(stages, num_microbatches=6)
    for m in range(6):
        pairs = set()
        for stage, other in ((0, 1), (1, 0)):
            count, ranks = plan.stages[stage].tensor, plan.stages[other].tensor
            received = Counter()
            for shard in range(count):
                own = plan.rank_of(stage, m, shard)
                targets = targets_of(plan, other, m, shard, count)
                received.update(targets)
                pairs |= {(own, rank) if stage == 0 else (rank, own) for rank in targets}
                for rank in targets:
                    assert source_of(plan, stage, m, plan.place(rank).shard) == own
            assert received == Counter(plan.rank_of(other, m, shard) for shard in range(ranks))
        assert pairs_over(plan, 0, m) == pairs
