"""Replicas that hold a share of the experts each compute what one process does, which has them all."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.errors import UserError
from hybridpipe.model.experts import Experts, hold_parts
from hybridpipe.model.recording import Unsplittable, is_recording, record
from hybridpipe.stage.experts import SplitExperts, called_in_order, split_experts_in
from tests.mixtures import EXPERTS, WIDTH
from tests.mixtures import Experts as Mixed
from tests.stage.helpers import Call

NAMES = ("up", "bias", "down")


class Exchange:
    """A replica's exchange with others in threads: all hand in, then all take."""

    def __init__(self, rank: int, size: int, barrier: threading.Barrier, handed_in: list):
        self.rank, self.size, self.barrier, self.handed_in = rank, size, barrier, handed_in
        self.calls: list[str] = []

    def swap(self, sent) -> list[torch.Tensor]:
        self.handed_in[self.rank] = sent
        self.barrier.wait()
        theirs = [each[self.rank].clone() for each in self.handed_in]
        self.barrier.wait()
        return theirs

    def numbers(self, sent):
        self.calls.append("numbers")
        return torch.stack(self.swap(sent))

    def rows(self, sent, sent_counts, counts):
        self.calls.append("rows")
        assert len(sent_counts) == len(counts) == self.size
        theirs = self.swap(sent.detach().split(sent_counts))
        assert list(map(len, theirs)) == list(counts)
        return torch.cat(theirs)


def exchanges(size: int) -> list[Exchange]:
    barrier, handed_in = threading.Barrier(size, timeout=20), [None] * size
    return [Exchange(rank, size, barrier, handed_in) for rank in range(size)]


class Mixture(nn.Module):
    """Each token chooses k experts by its values, or all choose those of `chosen`."""

    def __init__(self, k: int, chosen: tuple[int, ...] = (), kind: torch.dtype | None = None):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS), Mixed()
        self.k, self.chosen, self.kind = k, chosen, kind

    def forward(self, x):
        likely = torch.softmax(self.gate(x), -1)
        index = likely.topk(self.k).indices
        if self.chosen:
            index = torch.tensor([self.chosen]).expand(len(x), -1)
        return x + self.experts(x, index, likely.gather(1, index).to(self.kind or x.dtype))


def mixtures(*args, layers: int = 1) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(*(Mixture(*args) for _ in range(layers))).double()


def split(whole: nn.Sequential, size: int) -> list[nn.Sequential]:
    """Replicas of a model that hold their share of the experts in each layer."""
    replicas = [copy.deepcopy(whole) for _ in range(size)]
    for replica, exchange in zip(replicas, exchanges(size), strict=True):
        for i, layer in enumerate(replica):
            experts = Experts(f"{i}.experts", NAMES, EXPERTS)
            hold_parts(replica, [experts], exchange.rank, size, None)
            layer.experts.forward = SplitExperts(experts.path, layer.experts, EXPERTS, exchange)
        split_experts_in(replica)
    return replicas


def together(replicas, function, *each) -> list:
    """Call a function of each replica, a thread each."""

    def run(replica, *args):
        try:
            return function(replica, *args)
        except threading.BrokenBarrierError:
            raise
        except Exception:
            next(iter(split_experts_in(replica))).exchange.barrier.abort()  # others need not wait
            raise

    with ThreadPoolExecutor(len(replicas)) as pool:
        return [future.result() for future in [pool.submit(run, *args) for args in zip(replicas, *each)]]


def batches(*sizes: int | None) -> list[torch.Tensor | None]:
    """Tokens of each replica; None: it has no microbatch."""
    numbers = torch.Generator().manual_seed(5)
    return [
        None
        if size is None
        else torch.randn(size, WIDTH, dtype=torch.float64, generator=numbers).requires_grad_()
        for size in sizes
    ]


def factors(count: int) -> torch.Tensor:
    """Gradients of outputs, all different."""
    return torch.arange(1, count * WIDTH + 1, dtype=torch.float64).reshape(-1, WIDTH).cos()


def forward(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """Run a forward as a stage does."""
    with called_in_order(split_experts_in(model)):
        return model(x)


def train(model: nn.Sequential, x: torch.Tensor | None) -> torch.Tensor | None:
    """Run forward and backward, or join them; return the output."""
    if x is not None:
        output = forward(model, x)
        output.backward(factors(len(x)))
        return output.detach()
    outputs = [experts.join() for experts in split_experts_in(model)]
    assert all(each.shape == (0, WIDTH) and each.requires_grad for each in outputs)
    torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs])
    return None


def close(own, expected, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(own, expected, rtol=0, atol=tolerance)


def check(whole: nn.Sequential, *sizes: int | None, tolerance: float = 1e-12) -> list[nn.Sequential]:
    """Train all replicas and one process; compare outputs and all gradients."""
    replicas, mine, expected = split(whole, len(sizes)), batches(*sizes), batches(*sizes)
    outputs = together(replicas, train, mine)
    for x, output, other in zip(mine, outputs, expected, strict=True):
        if x is not None:
            close(output, train(whole, other), tolerance)
            close(x.grad, other.grad, tolerance)
    for i, layer in enumerate(whole):
        for name, parameter in layer.gate.named_parameters():
            each = [replica[i].gate.get_parameter(name).grad for replica in replicas]
            close(sum(gradient for gradient in each if gradient is not None), parameter.grad, tolerance)
        for name in NAMES:
            each = [replica[i].experts.get_parameter(name) for replica in replicas]
            own = [torch.zeros_like(p) if p.grad is None else p.grad for p in each]
            close(torch.cat(own), layer.experts.get_parameter(name).grad, tolerance)
    return replicas


# As in one process


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("sizes", [(5, 5), (7, 2), (1, 1), (6,), (5, 3, 8, 2)], ids=str)
def test_outputs_and_gradients_are_those_of_one_process(sizes, k):
    check(mixtures(k), *sizes)


@pytest.mark.parametrize("sizes", [(0, 4), (4, 0), (0, 5, 0, 0), (3, 0, 2, 1)], ids=str)
def test_a_replica_without_tokens_takes_part(sizes):
    check(mixtures(2), *sizes)


@pytest.mark.parametrize("sizes", [(4, None), (None, 4), (5, None, None, None), (3, 0, None, 2)], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
def test_a_replica_without_a_microbatch_joins(sizes, layers):
    check(mixtures(2, layers=layers), *sizes)


@pytest.mark.parametrize("chosen", [(0,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("sizes", [(5, 4), (5, None), (0, 3), (2, 3, 4, 1)], ids=str)
def test_all_tokens_may_go_to_one_replica(sizes, chosen):
    check(mixtures(len(chosen), chosen), *sizes)


@pytest.mark.parametrize("sizes", [(5, 4), (0, 3), (2, None), (2, 3, 4, 1)], ids=str)
def test_modules_follow_each_other(sizes):
    """Tokens of the second come from the first, so their gradients pass two exchanges."""
    replicas = check(mixtures(2, layers=3), *sizes)
    assert [each.number for each in split_experts_in(replicas[1])] == [0, 1, 2]
    for replica in replicas:
        for experts in split_experts_in(replica):
            assert experts.exchange.calls == (["numbers", "rows", "rows", "rows"] * 3 + ["rows"] * 9)


@pytest.mark.parametrize("sizes", [(5, 4), (3, None), (0, 2)], ids=str)
def test_weights_of_less_precision_beside_tokens(sizes):
    check(mixtures(2, (), torch.float32), *sizes, tolerance=1e-6)
    replicas, tokens = split(whole := mixtures(2, (), torch.float32), 2), batches(4, 4)
    for own, x in zip(together(replicas, forward, tokens), tokens, strict=True):
        assert own.dtype == torch.float64
        close(own, whole(x))


@pytest.mark.parametrize("sizes", [(5, 4), (3, None), (0, 2), (None, 2, 3, None)], ids=str)
def test_without_gradients(sizes):
    whole = mixtures(2, layers=2)

    @torch.no_grad()
    def infer(replica, x):
        return forward(replica, x) if x is not None else [each.join() for each in split_experts_in(replica)]

    for x, own in zip(tokens := batches(*sizes), together(split(whole, len(sizes)), infer, tokens)):
        if x is not None:
            assert not own.requires_grad
            close(own, whole(x).detach())
        else:
            assert [(each.shape, each.requires_grad) for each in own] == [((0, WIDTH), False)] * 2


def test_tokens_in_batches_and_arguments_by_name():
    whole = mixtures(2)[0].experts
    index, weights = torch.tensor([[0, 3], [1, 2], [3, 1], [2, 0]]), torch.rand(4, 2, dtype=torch.float64)
    replicas = split(nn.Sequential(mixtures(2)[0]), 2)
    tokens = batches(4, 4)

    def run(replica, x):
        with called_in_order(split_experts_in(replica)):
            return replica[0].experts(weights=weights, index=index, tokens=x.view(2, 2, WIDTH))

    for x, own in zip(tokens, together(replicas, run, tokens), strict=True):
        assert own.shape == (2, 2, WIDTH)
        close(own.view(4, WIDTH), whole(x, index, weights))


def test_an_expert_chosen_twice_counts_twice():
    check(mixtures(2, (1, 1)), 3, 2)


def test_parameters_without_a_token_get_a_gradient_of_zeros():
    """In one process other experts of the module give them one; without, an optimizer would skip them."""
    replicas = check(mixtures(1, (0,)), 3, 2)
    first, second = (replica[0].experts for replica in replicas)
    assert [p.grad is None for p in (*first.parameters(), *second.parameters())] == [False] * 3 + [True] * 3
    second.bias.requires_grad_(False)
    before = first.up.grad.clone()
    for each in (first, second):
        each.forward.add_missing_gradients()
    assert torch.equal(first.up.grad, before)
    assert second.bias.grad is None and second.up.grad.eq(0).all() and second.up.grad.shape == second.up.shape


# What is not split


def one_of_two(module: nn.Module) -> SplitExperts:
    """The first of two replicas; the other one never comes."""
    made = SplitExperts("layers.0.experts", module.double(), EXPERTS, exchanges(2)[0])
    made.calls = []
    return made


def changed(forward) -> nn.Module:
    """Experts with another forward, which can call the real one."""
    return type("Changed", (Mixed,), {"forward": forward})()


def normalised(self, tokens, index, weights):
    return Mixed.forward(self, tokens, index, weights / weights.sum(-1, keepdim=True))


def dropping(self, tokens, index, weights):
    return nn.functional.dropout(Mixed.forward(self, tokens, index, weights), 0.1, self.training)


def failing(self, tokens, index, weights):
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    "forward, told",
    [
        (
            dropping,
            "the experts layers.0.experts draw random numbers, which would depend on the plan: move the "
            "dropout behind them",
        ),
        (
            normalised,
            "the experts layers.0.experts compute a token's experts together, so they cannot be split: "
            "normalise the weights before they are called",
        ),
        (failing, "the experts layers.0.experts fail on a few tokens: no such kernel"),
        (
            lambda self, tokens: tokens,
            "the experts layers.0.experts: forward must take tokens, indices of experts and weights, got "
            "['tokens']",
        ),
    ],
)
def test_experts_that_cannot_be_split_are_refused(forward, told):
    with pytest.raises(UserError) as raised:
        one_of_two(changed(forward))
    assert str(raised.value) == told


def test_trying_experts_out_leaves_no_trace():
    module, random_state = changed(Mixed.forward), torch.get_rng_state()
    one_of_two(module)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in module.parameters())
    with pytest.raises(UserError):
        one_of_two(changed(dropping))
    torch.set_rng_state(random_state)
    one_of_two(Mixed())


TOKENS, INDEX, WEIGHTS = torch.ones(5, WIDTH).double(), torch.zeros(5, 2, dtype=torch.int64), torch.ones(5, 2)
OF_5_TOKENS = "indices and weights must have shape (5, k), for 5 tokens, got"


@pytest.mark.parametrize(
    "args, told",
    [
        ((TOKENS, INDEX, WEIGHTS[:, :1]), f"{OF_5_TOKENS} [5, 2] and [5, 1]"),
        ((TOKENS, INDEX[:4], WEIGHTS[:4]), f"{OF_5_TOKENS} [4, 2] and [4, 2]"),
        ((TOKENS, INDEX[:, 0], WEIGHTS[:, 0]), f"{OF_5_TOKENS} [5] and [5]"),
        ((TOKENS, INDEX + 3, WEIGHTS), ""),
        ((TOKENS, INDEX + 4, WEIGHTS), "indices must be in 0 to 3, got 4 to 4"),
        ((TOKENS, INDEX + INDEX.new_tensor([0, 9]), WEIGHTS), "indices must be in 0 to 3, got 0 to 9"),
        ((TOKENS, INDEX, 1.0), "must be called with tokens, indices of experts and weights, got 3 arguments"),
    ],
)
def test_calls_of_another_form_are_refused(args, told):
    experts = one_of_two(Mixed())
    experts.exchange.barrier.abort()
    if not told:
        with pytest.raises(threading.BrokenBarrierError):
            experts(*args)
        return
    with pytest.raises(UserError) as raised:
        experts(*args)
    assert str(raised.value) == f"the experts layers.0.experts: {told}"
    assert experts.exchange.calls == []


def test_a_call_has_no_more_and_no_fewer_than_three_tensors():
    def forward(self, tokens, index, weights=None, scale=None):
        return Mixed.forward(self, tokens, index, weights)

    experts = one_of_two(changed(forward))
    for args, count in (((TOKENS, INDEX), 2), ((TOKENS, INDEX, WEIGHTS, WEIGHTS), 4)):
        with pytest.raises(
            UserError, match=f"tokens, indices of experts and weights, got {count} arguments$"
        ):
            experts(*args)


# Where replicas differ


def mistakes(replicas, function, *each) -> list[str]:
    """What each replica is told."""

    def run(replica, *args):
        for experts in split_experts_in(replica):
            experts.calls = []
        with pytest.raises(UserError) as raised:
            function(replica, *args)
        assert "\n" not in str(raised.value)
        return str(raised.value)

    return together(replicas, run, *each)


def test_replicas_in_different_modules_are_told_all():
    told = mistakes(
        split(mixtures(2, layers=2), 2), lambda replica, x, i: replica[i](x), batches(3, 4), (0, 1)
    )
    for i, each in enumerate(told):
        assert each.startswith(f"the experts {i}.experts: replicas are in another module's exchange, or have")


def test_who_joins_joins_all_modules_in_their_order():
    def run(replica, x):
        return replica[0](x) if x is not None else split_experts_in(replica)[1].join()

    assert len(mistakes(split(mixtures(2, layers=2), 4), run, batches(3, None, 2, 1))) == 4


def test_replicas_with_other_kinds_of_tokens_are_told_all():
    tokens = [each.detach().to(kind) for each, kind in zip(batches(3, 4), (torch.float64, torch.float32))]

    def run(replica, x):
        return replica[0].experts(x, INDEX[: len(x)], WEIGHTS[: len(x)])

    assert all("other kinds of tokens" in each for each in mistakes(split(mixtures(2), 2), run, tokens))


# While a forward is recorded


class Recorded(nn.Module):
    """Calls experts of weights in float32 with tokens in two dimensions before the last."""

    def __init__(self, experts: nn.Module, seen: list):
        super().__init__()
        self.experts, self.see = experts, seen.append

    def forward(self, x):
        index, weights = INDEX[:4], WEIGHTS[:4] * x.sum().float()
        found = self.experts(2 * x, index, weights)
        self.see((is_recording(), found.shape, found.dtype))
        return found + 1


@pytest.mark.parametrize("training", [True, False])
def test_while_a_forward_is_recorded_nothing_is_exchanged(training):
    """One replica alone records, so an exchange would wait for ever."""
    experts, seen = split(mixtures(2), 2)[0][0].experts, []
    tokens = torch.ones(2, 2, WIDTH, dtype=torch.float64)
    record(Recorded(experts, seen), (tokens,), training=training)
    assert set(seen) == {(True, (2, 2, WIDTH), torch.float64)} and not is_recording()
    assert experts.forward.exchange.calls == []


def test_a_recording_that_fails_ends():
    def fail():
        raise ZeroDivisionError

    with pytest.raises(Unsplittable, match="recording fails: ZeroDivisionError"):
        record(Call(lambda x: fail()), torch.ones(2), training=True)
    assert not is_recording()


# Calls that a replica without a microbatch would not know of


def called(model: nn.Sequential, function) -> str:
    """What a forward is told that calls experts otherwise than once each, in their order."""
    with pytest.raises(UserError) as raised, called_in_order(split_experts_in(model)):
        function(model)
    return str(raised.value)


def alone() -> nn.Sequential:
    """A model of two mixtures whose replica is the only one."""
    return split(mixtures(2, layers=2), 1)[0]


def test_experts_are_called_once_each_in_their_order():
    (x,) = batches(3)
    told = "must call each of the modules whose experts are split once, in their order: 0.experts, 1.experts"
    for function, paths in (
        (lambda model: model[0](x), "0.experts"),
        (lambda model: model[1](model[0](model[0](x))), "0.experts, 0.experts, 1.experts"),
        (lambda model: model[0](model[1](x)), "1.experts, 0.experts"),
        (lambda model: None, "none"),  # as where weights are used without calling the module
    ):
        assert called(alone(), function) == f"a forward {told}; it called {paths}"


def test_an_activation_checkpoint_is_refused_in_its_first_backward():
    model, (x,) = alone(), batches(3)
    with called_in_order(split_experts_in(model)):
        out = checkpoint(model, x, use_reentrant=False)
    with pytest.raises(UserError, match="called outside of their stage's forward, as an activation check"):
        out.sum().backward()


def test_of_a_closed_trainer_no_experts_are_called():
    model, (x,) = alone(), batches(3)
    for experts in split_experts_in(model):
        experts.is_closed = True
    with pytest.raises(UserError, match="its trainer is closed: take full_state_dict"):
        forward(model, x)


@pytest.mark.parametrize("sizes", [(5, 4), (3, None), (None, 2, 0)], ids=str)
def test_frozen_experts_may_run_without_a_graph(sizes):
    """Who joins has no graph then either, so that nobody waits for a backward."""
    replicas = split(mixtures(2), 4 if len(sizes) == 3 else 2)
    given = [*batches(*sizes), *[None] * (len(replicas) - len(sizes))]

    def run(replica, x):
        if x is None:
            return split_experts_in(replica)[0].join().requires_grad
        with torch.no_grad():
            return forward(replica, x).requires_grad

    assert together(replicas, run, given) == [False] * len(replicas)
