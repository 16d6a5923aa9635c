"""SyncBatchNorm: how many replicas of each stage normalise their microbatches together.

Knows a model's stages and a plan; no exchange. Invariant: all BatchNorm layers of a stage normalise alike,
and what cannot is refused in one line before the training.
"""

from dataclasses import replace

from torch import nn

from hybridpipe.model.layers import Layers
from hybridpipe.planning.plan import Plan, StageSpec
from hybridpipe.torch_private import AnyBatchNorm


def check_has_norms(model: nn.Module, together: int) -> None:
    """Raises ValueError where nothing of a model would be normalised together."""
    if together > 1 and not any(isinstance(each, AnyBatchNorm) for each in model.modules()):
        raise ValueError(
            f"sync_batchnorm must be 1 for a model without a BatchNorm layer of torch's, got {together}"
        )


def synchronised(plan: Plan, layers: Layers, together: int) -> Plan:
    """Return the plan whose stages say how many of their replicas normalise together.

    Args:
        together: replicas, as `UpdateOptions.sync_batchnorm` says.

    Raises:
        ValueError: a stage with BatchNorm has other replicas, its schedule does not run them together, or the
            plan was made for another number.
    """
    is_asked = together > 1 or any(spec.sync_batchnorm > 1 for spec in plan.stages)
    if not is_asked and not any(isinstance(each, nn.SyncBatchNorm) for each in layers.model.modules()):
        return plan  # as nearly always; a search asks for each plan that it has found
    stages, given = [], f"the training has sync_batchnorm = {together}"
    for s, spec in enumerate(plan.stages):
        stage = layers.stage(spec.start, spec.stop)
        found = _together(stage.module, spec, together, f"stage {s} of plan {plan.name}")
        if together == 1 < found:
            given = "nn.SyncBatchNorm normalises all replicas of a stage together"
        if spec.sync_batchnorm not in (1, found):
            raise ValueError(
                f"stages[{s}].sync_batchnorm must be {found}, as {given}, got {spec.sync_batchnorm}"
            )
        stages.append(replace(spec, sync_batchnorm=found))
    if tuple(stages) == plan.stages:
        return plan
    try:
        return replace(plan, stages=tuple(stages))
    except ValueError as error:
        raise ValueError(f"{error}; {given}") from None


def _together(module: nn.Module, spec: StageSpec, together: int, where: str) -> int:
    """Return how many replicas of a stage normalise together: 1 where it has no BatchNorm."""
    norms = [each for each in module.modules() if isinstance(each, AnyBatchNorm)]
    are_synced = [isinstance(each, nn.SyncBatchNorm) for each in norms]
    if together == 1 and any(are_synced):
        if spec.replicas > 1 and not all(are_synced):
            raise ValueError(
                f"{where} has both BatchNorm and SyncBatchNorm: make all of one kind "
                "(nn.SyncBatchNorm.convert_sync_batchnorm), or set sync_batchnorm"
            )
        together = spec.replicas
    if together == 1 or not norms:
        return 1
    if spec.replicas % together:
        raise ValueError(
            f"{where} has BatchNorm and replicas = {spec.replicas}, which must be a multiple of "
            f"sync_batchnorm = {together}: give it as many, or let it end before the first BatchNorm"
        )
    if any(isinstance(each, _InstanceNorm) and each.track_running_stats for each in module.modules()):
        raise ValueError(
            f"{where} has BatchNorm, which normalises {together} replicas together, and an InstanceNorm with "
            "running statistics, which does not: cut between them, or set track_running_stats=False"
        )
    return together


_InstanceNorm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
