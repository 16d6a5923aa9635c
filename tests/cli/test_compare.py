from hybridpipe.cli.compare import same_plans
from tests.planning.helpers import plan


def test_runs_have_the_same_plan_if_they_had_it_in_every_round():
    one, other = plan([1, 1], 4), plan([2], 4)
    rounds = {"auto": [one, one], "dp": [other, other], "straight": [one, one], "mine.json": [one, other]}
    assert same_plans(rounds) == {"straight": "auto"}
