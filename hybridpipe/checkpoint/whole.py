"""Whole: the trained model as one file, written by rank 0 while the stages send their tensors.

Plans are not known here. Invariant: no rank holds more of the model than its own stages and one tensor.
"""

from collections.abc import Iterable
from pathlib import Path

from hybridpipe.checkpoint.disk import replacing
from hybridpipe.checkpoint.shard import plain_order, write_plain
from hybridpipe.engine.worker import Worker
from hybridpipe.model.held_part import whole_forms


def write_whole(worker: Worker, path: Path) -> None:
    """Write `Trainer.full_state_dict` to a safetensors file, which replaces an earlier one. Collective.

    Raises:
        UserError: rank 0 cannot write it; the other ranks wait for it then, so the job must end.
    """
    forms = whole_forms(worker.model)
    tensors = worker.gathered(plain_order(path, forms))
    if not worker.group.leads:
        _exhaust(tensors)
        return
    with replacing(path) as unfinished:
        write_plain(unfinished, forms, read=lambda name: next(tensors)[1])
    _exhaust(tensors)


def _exhaust(iterator: Iterable[object]) -> None:
    for _ in iterator:
        pass
