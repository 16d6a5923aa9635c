"""The check for NaN and infinity on one rank; tests/mpi covers the agreement of several ranks."""

from functools import partial

import pytest
import torch
from torch import nn

from hybridpipe.data.stream import Minibatch, Stream
from hybridpipe.model.stage_module import StageModule
from hybridpipe.optim.nonfinite import NonfiniteCheck, NotFinite
from hybridpipe.optim.update import UpdateRule
from hybridpipe.planning.plan import Place
from hybridpipe.stage.stage import Stage
from tests.engine.helpers import CPU, in_threads, make_plan

STREAM = Stream([Minibatch((2, 2), lambda m: None, lambda m: None)], step=7)
PLAN = make_plan("1-1", 4, 2)


class Rank:
    """The second stage of two."""

    def __init__(self, policy="stop", agree=int):
        self.stage = Stage(
            StageModule([nn.Linear(3, 3), nn.Linear(3, 3)], 2), CPU, loss=nn.functional.mse_loss
        )
        self.finite = NonfiniteCheck(policy, PLAN, Place(1, 0), [self.stage], agree)
        for parameter in self.stage.module.parameters():
            parameter.grad = torch.ones_like(parameter)

    def allows(self, *losses: float) -> bool:
        values = {m: torch.tensor(loss) for m, loss in enumerate(losses)}
        return self.finite.allows(values, STREAM, step=7)


def test_finite_numbers_pass():
    rank = Rank()
    assert rank.allows(1.0, 2.0)
    for parameter in rank.stage.module.parameters():
        parameter.grad = None  # as for an unused parameter
    assert rank.allows() and rank.allows(1.0)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_loss_is_named(bad):
    with pytest.raises(NotFinite, match=r"the loss of step 7, microbatch 1 \(stage 1\) is not finite: "):
        Rank().allows(1.0, bad)


def test_a_loss_without_weight_is_named_where_there_is_a_loss():
    rank = Rank()
    assert rank.finite.allows({}, STREAM, step=7, has_weight=False)  # the last stage tells
    told = r"^the loss of step 7 \(stage 1\) is not finite: nan, since the weights that .* add up to 0$"
    with pytest.raises(NotFinite, match=told):
        rank.finite.allows({1: torch.zeros(())}, STREAM, step=7, has_weight=False)


@pytest.mark.parametrize("bad, counted", [(torch.nan, "2 NaN and 0"), (-torch.inf, "0 NaN and 2")])
def test_a_gradient_is_named_where_the_backward_met_it_first(bad, counted):
    rank = Rank()
    for layer in rank.stage.module:
        layer.weight.grad[0, :2] = bad
    told = rf"gradient of step 7, stage 1, layer 3 \(Linear\), weight is not finite: {counted} infinite of 9"
    with pytest.raises(NotFinite, match=told):
        rank.allows(1.0)


def test_a_norm_that_overflows_is_no_reason():
    rank = Rank()
    rank.stage.module[0].weight.grad.fill_(3e38)
    assert rank.allows(1.0)


def test_ignoring_looks_at_nothing():
    assert Rank("ignore").allows(torch.nan)


def test_what_another_rank_has_found_counts():
    rank = Rank("skip", agree=lambda number: max(number, 1))
    assert not rank.allows(1.0) and rank.finite.num_skipped == 1


def test_the_rank_nearest_to_where_it_arose_tells(capsys):
    rank = Rank("skip")
    rank.stage.module[0].bias.grad.fill_(torch.nan)
    assert not rank.allows(1.0)
    told = "rank 1: the gradient of step 7, stage 1, layer 2 (Linear), bias is not finite: 3 NaN"
    assert told in capsys.readouterr().err
    other = Rank("skip", agree=lambda number: number + 1)
    other.stage.module[0].bias.grad.fill_(torch.nan)
    assert not other.allows(1.0)
    assert capsys.readouterr().err == ""


def test_training_stops_before_the_weights_are_spoilt():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(2)))
    data = [(torch.randn(4, 4), torch.randn(4, 4)) for _ in range(3)]
    data[1][0][2, 1] = torch.nan
    with pytest.raises(NotFinite, match=r"loss of step 1, microbatch 1 \(stage 1\)"):
        in_threads(
            make_plan("1-1", 2, 2), model, data, 2, nn.functional.mse_loss,
            rule=UpdateRule(partial(torch.optim.SGD, lr=0.1)),
        )  # fmt: skip


@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_a_sparse_gradient_is_looked_at_like_any_other():
    """Torch has neither a norm nor isfinite of the gradient of an embedding with sparse=True."""
    rank = Rank()
    weight = rank.stage.module[0].weight
    weight.grad = torch.sparse_coo_tensor([[1]], torch.ones(1, 3), (3, 3))
    assert rank.allows(1.0)
    weight.grad = torch.sparse_coo_tensor([[1]], torch.tensor([[1.0, torch.nan, 1.0]]), (3, 3))
    with pytest.raises(NotFinite, match=r"\(Linear\), weight is not finite: 1 NaN and 0 infinite of 3"):
        rank.allows(1.0)


@pytest.mark.parametrize(
    "plan, place, seconds",
    [
        (make_plan("1-1", 4, 2), Place(1, 0), 0.0),  # nobody is nearer to where it arose
        (make_plan("1-2", 4, 2), Place(1, 1), 0.25),  # behind the first replica
        (make_plan("2-1", 4, 2), Place(0, 0), 0.5),
        (make_plan("2-1", 4, 2), Place(0, 1), 0.75),
        (make_plan("1-1-1-1-1-1", 6, 2), Place(1, 0), 2.0),
        (make_plan("1-1-1-1-1-1", 6, 2), Place(0, 0), 2.0),  # four stages behind or more
    ],
)
def test_a_rank_far_from_the_end_lets_others_report_first(plan, place, seconds):
    stage = Stage(StageModule([nn.Linear(3, 3)]), CPU, loss=nn.functional.mse_loss)
    check = NonfiniteCheck("stop", plan, place, [stage], int)
    with pytest.raises(NotFinite) as told:
        check.allows({0: torch.tensor(torch.nan)}, STREAM, step=7)
    assert told.value.stagger_seconds == seconds


def test_who_tells_is_known_by_stage_and_then_by_rank():
    """Each rank passes another number for a loss and for a gradient; later stages pass larger ones."""
    plan, numbers = make_plan("2-2", 4, 2), []

    def agree(number):
        numbers.append(number)
        return number + 1

    for place in (Place(0, 0), Place(0, 1), Place(1, 0), Place(1, 1)):
        stage = Stage(StageModule([nn.Linear(3, 3)]), CPU)
        check = NonfiniteCheck("skip", plan, place, [stage], agree)
        assert not check.allows({}, STREAM, step=7)
        stage.module[0].bias.grad = torch.full((3,), torch.nan)
        assert not check.allows({}, STREAM, step=7)
        assert not check.allows({0: torch.tensor(torch.nan)}, STREAM, step=7)
        assert check.num_skipped == 3
    fine, gradients, losses = numbers[::3], numbers[1::3], numbers[2::3]
    assert fine == [0, 0, 0, 0]
    assert 0 < gradients[0] < gradients[1] < gradients[2] < gradients[3] < losses[0]
    assert len({*gradients, *losses}) == 8


def test_a_gradient_that_another_stage_checks_is_passed_by():
    rank = Rank()
    shared = rank.stage.module[0].weight
    shared.grad.fill_(torch.nan)
    check = NonfiniteCheck("stop", PLAN, Place(1, 0), [rank.stage], int, elsewhere=[shared])
    assert check.allows({}, STREAM, step=7)
    rank.stage.module[1].weight.grad.fill_(torch.nan)
    with pytest.raises(NotFinite, match=r"layer 3 \(Linear\), weight"):
        check.allows({}, STREAM, step=7)


def test_a_part_is_checked_for_its_parameter():
    """Where replicas shard the update, gradients are on the parts, and other replicas' nowhere here."""
    rank = Rank()
    first, second = rank.stage.module[0].weight, rank.stage.module[1].weight
    part = nn.Parameter(first.detach().view(-1)[:4])
    check = NonfiniteCheck("stop", PLAN, Place(1, 0), [rank.stage], int, parts={first: part})
    first.grad = None
    second.grad.fill_(torch.nan)
    part.grad = torch.ones(4)
    assert check.allows({}, STREAM, step=7), "another replica updates the second"
    part.grad[1] = torch.inf
    with pytest.raises(NotFinite, match=r"\(Linear\), weight is not finite: 0 NaN and 1 infinite of 4"):
        check.allows({}, STREAM, step=7)
