"""Shards to measure: the numbers of them that a model's tensor plan allows, and its layers as one of them.

Knows models and their tensor plans; no search. Invariant: the model itself is not changed.
"""

from collections.abc import Sequence

from torch import nn

from hybridpipe.engine.splitting import split_tensors
from hybridpipe.measure.shards import CountedSums
from hybridpipe.model.deferred_init.deferred import Numbers
from hybridpipe.model.held_part import HeldPart
from hybridpipe.model.layers import Layers
from hybridpipe.model.parallel_plans import StylePlan
from hybridpipe.model.tensor_plan import SplitModule, parts_by, split_modules_of
from hybridpipe.planning.plan import Plan, StageSpec


def numbers_of_shards(layers: Layers, given: StylePlan | None, most: int) -> list[int]:
    """Return the powers of two up to `most`, but for 1, by which all of a model's named weights divide."""
    modules = split_modules_of(layers.model, given)
    doubled = (2**k for k in range(1, most.bit_length()))
    return [count for count in doubled if _divides(layers, modules, count)]


def _divides(layers: Layers, modules: Sequence[SplitModule], count: int) -> bool:
    try:
        _parts(layers.model, layers, modules, count)
    except ValueError:  # says what does not divide; other numbers may
        return False
    return True


def _parts(
    model: nn.Module, layers: Layers, modules: Sequence[SplitModule], count: int
) -> dict[str, HeldPart]:
    plan = Plan((StageSpec(0, layers.num_layers, tensor=count),))
    return parts_by(model, plan, modules, layers.holders(plan))


def first_shard(
    layers: Layers, given: StylePlan | None, count: int, numbers: Numbers | None
) -> tuple[Layers, CountedSums]:
    """Return a copy of the layers as the first of several shards has them, and the sums that it would make.

    Args:
        numbers: of parameters on the meta device.

    Raises:
        ValueError: the shards do not divide a weight.
    """
    copy, sums = layers.copied(), CountedSums(count)
    modules = split_modules_of(copy.model, given)
    split_tensors(copy.model, modules, _parts(copy.model, layers, modules, count), sums, None)
    if numbers is not None:
        numbers.fill_for_measuring(copy.model)  # of parts: whole ones may not fit
    return copy, sums
