"""Parquet: rows of a folder, as Spark writes it, as samples for training.

Not known here: Spark and ranks. Invariant: order of rows follows from the files' names, so it is the same on
every rank, and only row groups with rows that are asked for are read.
"""

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from hybridpipe.errors import REMEDIES, UserError

Rows = Tensor | Sequence[Tensor]  # a column, by row
GROUPS_IN_MEMORY = 256  # the last ones read; of hybridpipe.spark each is about 1 MiB


class Parquet(Dataset[Any]):
    """Rows of the `*.parquet` files in a folder, in the order of their names.

    A sample is a dict of all columns, or a pair where two are named. A number becomes a tensor without
    dimensions, a list of n numbers one of shape (n,); dtypes stay as they are.

    Args:
        folder: holds the files, on a disk of every rank that reads.
        inputs: column of a pair's first part; None: samples are dicts.
        target: column of its second part.

    Raises:
        UserError: there are no files, a column is missing or not numeric, or pyarrow is missing.
    """

    def __init__(
        self, folder: str | os.PathLike[str], inputs: str | None = None, target: str | None = None
    ) -> None:
        if (inputs is None) != (target is None):
            raise UserError(f"inputs and target are two columns, or None, got {inputs!r} and {target!r}")
        self.folder = Path(folder)
        self._pair = None if inputs is None or target is None else (inputs, target)
        self._files = sorted(self.folder.glob("*.parquet"), key=lambda path: (len(path.name), path.name))
        if not self._files:
            raise UserError(f"{self.folder}: holds no *.parquet; every host must see this folder")
        parquet = _pyarrow_parquet()
        found = [parquet.read_metadata(file) for file in self._files]
        schemas = [each.schema.to_arrow_schema() for each in found]
        self._columns = list(self._pair or schemas[0].names)
        for file, schema in zip(self._files, schemas, strict=True):
            if missing := {*self._columns} - {*schema.names}:
                raise UserError(f"{file}: has no column {', '.join(sorted(missing))}")
            for name in self._columns:
                if (kind := schema.field(name).type) != (first := schemas[0].field(name).type):
                    raise UserError(f"{file}: column {name} must hold {first} as in other files, got {kind}")
        self._groups = [(file, i) for file, meta in enumerate(found) for i in range(meta.num_row_groups)]
        sizes = [found[file].row_group(i).num_rows for file, i in self._groups]
        self._starts: list[int] = [0, *accumulate(sizes)]
        self._read: OrderedDict[int, Mapping[str, Rows]] = OrderedDict()

    def pairs(self, inputs: str, target: str) -> "Parquet":
        """Return the same rows as pairs of two columns."""
        return Parquet(self.folder, inputs, target)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        group = bisect_right(self._starts, index) - 1
        columns, row = self._columns_of(group), index - self._starts[group]
        if self._pair is not None:
            inputs, target = self._pair
            return columns[inputs][row], columns[target][row]
        return {name: column[row] for name, column in columns.items()}

    def _columns_of(self, group: int) -> Mapping[str, Rows]:
        if group not in self._read:
            file, index = self._groups[group]
            with _pyarrow_parquet().ParquetFile(self._files[file]) as opened:
                table = opened.read_row_group(index, columns=self._columns, use_threads=False)
            self._read[group] = {name: _tensors(name, table[name]) for name in self._columns}
            if len(self._read) > GROUPS_IN_MEMORY:
                self._read.popitem(last=False)
        self._read.move_to_end(group)
        return self._read[group]


def _pyarrow_parquet() -> Any:
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UserError(f"Parquet needs pyarrow, which is missing: {REMEDIES['pyarrow']}") from None
    return pyarrow.parquet


def _tensors(name: str, column: Any) -> Rows:
    """Return a column of numbers, or of lists of numbers, as one tensor for each row."""
    import pyarrow.types as types

    kind, array = column.type, column.combine_chunks()
    is_list = types.is_list(kind) or types.is_large_list(kind)
    numbers = kind.value_type if is_list else kind
    values = array.flatten() if is_list else array
    if not (types.is_integer(numbers) or types.is_floating(numbers) or types.is_boolean(numbers)):
        raise UserError(f"column {name} must hold numbers, or lists of numbers, got {kind}")
    if array.null_count or values.null_count:
        raise UserError(f"column {name} must hold numbers, got null")
    made = torch.tensor(values.to_numpy(zero_copy_only=False))
    return torch.split(made, array.value_lengths().to_pylist()) if is_list else made
