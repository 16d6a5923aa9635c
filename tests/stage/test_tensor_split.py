"""Shards that have parts of a module's weights compute together what one process does, which has them all."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch._dynamo  # which a checkpoint would import in two threads at once
from torch import nn
from torch.utils.checkpoint import checkpoint

from hybridpipe.errors import UserError
from hybridpipe.model.held_part import HeldPart
from hybridpipe.model.holding import hold
from hybridpipe.model.recording import record
from hybridpipe.model.tensor_plan import SHARD, split_modules_of
from hybridpipe.stage.tensor_split import TensorSplit
from tests.blocks import OF_BLOCK, PLAN, WIDTH, Block, blocks
from tests.mixtures import points_of


class Sums:
    """A shard's exchange with others in threads: all hand in, then all take."""

    def __init__(self, index: int, size: int, barrier: threading.Barrier, handed_in: list):
        self.index, self.size, self.barrier, self.handed_in = index, size, barrier, handed_in
        self.calls: list[str] = []

    def swap(self, sent: torch.Tensor) -> list[torch.Tensor]:
        self.handed_in[self.index] = sent.detach().clone()
        self.barrier.wait()
        theirs = list(self.handed_in)
        self.barrier.wait()
        return theirs

    def sum(self, tensor):
        self.calls.append("sum")
        return sum(self.swap(tensor))

    def gather(self, tensor):
        self.calls.append("gather")
        return torch.cat(self.swap(tensor), -1)


class Shard:
    """One shard of a copy of a model."""

    def __init__(self, model: nn.Module, plan: dict[str, str], sums: Sums):
        self.model, self.sums = copy.deepcopy(model), sums
        modules = split_modules_of(self.model, plan)
        self.parts = {
            key: HeldPart(self.model.get_parameter(key).shape, SHARD, sums.index, sums.size, *cut)
            for each in modules
            for key, cut in each.keys.items()
        }
        hold(self.model, self.parts, None)
        self.split = TensorSplit(self.model, modules, sums)


def shards_of(model: nn.Module, plan, size: int = 2) -> list[Shard]:
    barrier, handed_in = threading.Barrier(size, timeout=20), [None] * size
    return [Shard(model, dict(plan), Sums(index, size, barrier, handed_in)) for index in range(size)]


def together(shards: list[Shard], work) -> list:
    with ThreadPoolExecutor(len(shards)) as threads:
        return list(threads.map(work, shards))


def joined(shards: list[Shard], key: str, of=lambda parameter: parameter) -> torch.Tensor:
    """What the shards have of a parameter, or of its gradient, as one."""
    values = [of(shard.model.get_parameter(key)).detach() for shard in shards]
    if key not in shards[0].parts:
        assert all(torch.equal(values[0], other) for other in values[1:]), f"{key} differs"
        return values[0]
    whole = torch.zeros(shards[0].parts[key].whole, dtype=values[0].dtype)
    for shard, value in zip(shards, values, strict=True):
        shard.parts[key].put(whole, value)
    return whole


class Attention(nn.Module):
    """Three projections of one input, as in transformers."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, 8) for _ in range(3))
        self.o = nn.Linear(8, WIDTH)

    def forward(self, x):
        q, k, v = (each(x).unflatten(-1, (-1, 4)).transpose(0, 1) for each in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(-2))


OF_ATTENTION = {"q": "colwise", "k": "colwise", "v": "colwise", "o": "rowwise"}


class Words(nn.Module):
    """Tied embeddings, of which one entry is for padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(12, WIDTH, padding_idx=7), nn.Linear(WIDTH, 12, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.embed(x)))


OF_WORDS = {"embed": "embedding_rowwise", "out": "colwise_gather_output"}
X = points_of(9)[0]
CASES = {
    "blocks": (blocks, PLAN, X),
    "block": (Block, OF_BLOCK, torch.randn(9, WIDTH, dtype=torch.float64)),
    "tokens": (Block, OF_BLOCK, torch.randn(2, 3, WIDTH, dtype=torch.float64)),
    "attention": (Attention, OF_ATTENTION, torch.randn(5, WIDTH, dtype=torch.float64)),
    "words": (Words, OF_WORDS, torch.tensor([[0, 7, 11], [5, 6, 7]])),
}


@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_those_of_the_whole(name):
    make, plan, x = CASES[name]
    torch.manual_seed(1)
    whole = make().double()
    shards = shards_of(whole, plan)
    inputs = x.clone().requires_grad_(x.is_floating_point())
    expected = whole(inputs)
    weights = torch.rand_like(expected)
    (expected * weights).sum().backward()

    def train(shard: Shard):
        given = x.clone().requires_grad_(x.is_floating_point())
        out = shard.model(given)
        (out * weights).sum().backward()
        return out.detach(), given.grad

    made = together(shards, train)
    for out, gradient in made:
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        assert torch.equal(out, made[0][0])
        if x.is_floating_point():
            torch.testing.assert_close(gradient, inputs.grad, rtol=0, atol=1e-12)
    for key, parameter in whole.named_parameters():
        assert torch.equal(joined(shards, key), parameter)
        of_parameter = joined(shards, key, lambda each: each.grad)
        torch.testing.assert_close(of_parameter, parameter.grad, rtol=0, atol=1e-12)


def test_the_gradients_of_one_input_are_summed_once():
    """Three projections get it: one sum in the forward, of the rows, and one in the backward."""
    shards = shards_of(Attention().double(), OF_ATTENTION)
    x = CASES["attention"][2]

    def train(shard: Shard):
        shard.model(x.clone().requires_grad_()).sum().backward()
        return shard.sums.calls

    assert together(shards, train) == [["sum", "sum"]] * 2


def test_without_gradients_nothing_is_summed_but_rows():
    shards = shards_of(Attention().double(), OF_ATTENTION)

    @torch.no_grad()
    def infer(shard: Shard):
        shard.model(CASES["attention"][2])
        return shard.sums.calls

    assert together(shards, infer) == [["sum"]] * 2


def test_an_input_that_was_changed_in_place_is_another_one():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other, self.down = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.one.requires_grad_(False)  # else autograd would need what is changed

        def forward(self, x):
            first = self.one(x)
            x.mul_(2)
            return self.down(first * self.other(x))

    plan = {"one": "colwise", "other": "colwise", "down": "rowwise"}
    whole, x = Twice().double(), torch.randn(3, 4, dtype=torch.float64)
    given = x.clone().requires_grad_()
    whole(given * 1).sum().backward()

    def train(shard: Shard):
        own = x.clone().requires_grad_()
        shard.model(own * 1).sum().backward()
        return own.grad

    for gradient in together(shards_of(whole, plan), train):
        torch.testing.assert_close(gradient, given.grad, rtol=0, atol=1e-12)


def test_activation_checkpoints_run_a_split_module_again():
    whole, x = Block().double(), CASES["block"][2]
    (shard,) = shards_of(whole, OF_BLOCK, 1)
    given = [x.clone().requires_grad_() for _ in range(2)]
    whole(given[0]).sum().backward()
    checkpoint(shard.model, given[1], use_reentrant=False).sum().backward()
    torch.testing.assert_close(given[1].grad, given[0].grad, rtol=0, atol=1e-12)
    assert shard.model.down.bias is not None


class Dropping(nn.Module):
    def __init__(self, inside: float, outside: float):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.inside, self.outside = nn.Dropout(inside), nn.Dropout(outside)

    def forward(self, x):
        return self.outside(self.down(self.inside(self.up(x))))


def test_random_numbers_between_split_weights_are_refused_and_others_are_not():
    plan, x = {"up": "colwise", "down": "rowwise"}, torch.randn(3, 4)
    together(shards_of(Dropping(0.0, 0.5), plan), lambda shard: shard.model(x))
    (shard,) = shards_of(Dropping(0.5, 0.0), plan, 1)
    with torch.no_grad():
        shard.model.eval()(x)
    with pytest.raises(UserError, match="the model draws random numbers between its split weights"):
        shard.model.train()(x)


def test_what_shards_make_apart_is_noticed_at_the_first_update():
    """Columns without rows behind them: each shard has another mean."""

    class Columns(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.Linear(4, 8)

        def forward(self, x):
            return self.up(x).mean(-1)

    def train(shard: Shard):
        shard.split.note(shard.model(torch.ones(3, 4)))
        with pytest.raises(UserError, match="what a stage makes differs between shards: "):
            shard.split.check_outputs()
        shard.split.note(shard.model(torch.ones(3, 4)))
        shard.split.check_once(dict)  # not again

    together(shards_of(Columns(), {"up": "colwise"}), train)


@pytest.mark.parametrize("apart", [False, True])
def test_gradients_that_differ_are_noticed_at_the_first_update(apart):
    def check(shard: Shard):
        own = torch.ones(3) * (1 + apart * shard.sums.index)
        gradients = {
            "a": None,
            "b": torch.tensor([float("nan")]),
            "c": own,
            "d": torch.ones(2).to(torch.cfloat),
        }
        if not apart:
            return shard.split.check_once(lambda: gradients)
        with pytest.raises(UserError, match="the gradient of c, which the tensor plan leaves whole, differs"):
            shard.split.check_once(lambda: gradients)

    together(shards_of(Block(), OF_BLOCK), check)


@pytest.mark.parametrize("index, shard", [(-1, 0), (12, 1)])
def test_an_entry_that_no_shard_has_fails_in_one_of_them(index, shard):
    """It had become zeros."""
    shards = shards_of(Words(), OF_WORDS)
    with pytest.raises(IndexError, match="index out of range"):
        shards[shard].model.embed(torch.tensor([index]))


def test_a_forward_is_recorded_without_the_others():
    shards = shards_of(blocks().double(), PLAN)
    outer = nn.Sequential(shards[0].model)
    found = record(outer, X, training=True)
    assert found is not None and shards[0].sums.calls == []


def test_gradients_that_are_zero_but_for_rounding_are_no_difference():
    """A key's bias changes no attention: GPUs have rounded its gradient otherwise on each shard."""

    def check(shard: Shard):
        noise = 1e-9 * torch.randn(8, generator=torch.Generator().manual_seed(shard.sums.index))
        shard.split.check_once(lambda: {"k.bias": noise, "q.weight": torch.ones(8)})

    together(shards_of(Block(), OF_BLOCK), check)


def test_a_sum_of_gradients_outside_of_what_is_split_is_refused():
    """Shards agreed on a gradient that was twice too large."""
    (shard,) = shards_of(Block(), OF_BLOCK | {"norm": "replicated_with_grad_allreduce"}, 1)
    with pytest.raises(
        UserError, match="norm sees whole values, so its gradients must not be summed over shards"
    ):
        shard.model(torch.ones(3, WIDTH))


def test_a_split_module_wants_its_input_by_position():
    (shard,) = shards_of(Block(), OF_BLOCK, 1)
    with pytest.raises(UserError, match="up is split, so it must be called with its input by position"):
        shard.model.up(input=torch.ones(3, WIDTH))


def test_a_bias_is_back_after_a_forward_that_fails():
    (shard,) = shards_of(Dropping(0.0, 0.0), {"up": "colwise", "down": "rowwise"}, 1)
    bias = shard.model.down.bias
    with pytest.raises(RuntimeError):
        shard.model.down(torch.ones(3, 5))
    assert shard.model.down.bias is bias
    assert shard.model(torch.ones(3, 4)).shape == (3, 4)


def test_a_split_module_says_that_its_trainer_is_closed():
    (shard,) = shards_of(Block(), OF_BLOCK, 1)
    shard.split.is_closed = True
    with pytest.raises(UserError, match="its trainer is closed: take full_state_dict"):
        shard.model(torch.ones(3, WIDTH))
