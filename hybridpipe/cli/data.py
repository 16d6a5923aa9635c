"""Data of a config, for the commands that look at its first microbatch.

Not known here: MPI. Invariant: what `train` refuses in one line, a UserError says here in the same words.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from hybridpipe.config.file import Config
from hybridpipe.data.reader import first_minibatch
from hybridpipe.data.samples import fingerprint
from hybridpipe.data.source import Source, source_of
from hybridpipe.errors import UserError
from hybridpipe.model.tensors import Tree


def data_of(config: Config) -> Source:
    """Build the config's data set, or the DataLoader of one; check it and a few of its samples.

    Raises:
        UserError: the data are missing, or cannot be trained on.
    """
    with in_one_line(OSError, ModuleNotFoundError):  # any other error of a factory keeps its traceback
        dataset = config.data.build()
    with in_one_line(TypeError, ValueError):
        source = source_of("dataset", dataset, minibatch_size=config.train.minibatch)
        fingerprint("dataset", source, config.train.seed)
    return source


def first_microbatch(config: Config, source: Source, samples: int | None = None) -> tuple[Tree, Tree]:
    """Return inputs and targets of the first microbatch of the config's data.

    Args:
        samples: in the microbatch; None for the config's microbatch.

    Raises:
        UserError: the microbatch cannot be made of its samples.
    """
    count = samples or config.train.microbatch or config.train.minibatch
    with in_one_line(TypeError, ValueError):
        batch = first_minibatch(source, count, count)
        return batch.inputs(0), batch.targets(0)


@contextmanager
def in_one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds into a UserError with their message.

    Raises:
        UserError: the body has raised such an error.
    """
    try:
        yield
    except kinds as error:
        raise error if isinstance(error, UserError) else UserError(str(error)) from None
