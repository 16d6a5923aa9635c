"""Parquet as a data set: the order of rows, the forms of samples, and what is read of the files."""

import pytest
import torch

from hybridpipe.data import Parquet
from hybridpipe.errors import UserError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


@pytest.fixture
def folder(tmp_path):
    """Ten rows in two files, in groups of two rows, as Spark names them."""
    for part in range(2):
        rows = range(5 * part, 5 * part + 5)
        columns = {
            "pixels": pa.array([[float(row), row + 0.5] for row in rows], pa.list_(pa.float32())),
            "digit": pa.array(rows, pa.int64()),
            "words": pa.array([list(range(row)) for row in rows], pa.list_(pa.int32())),
            "name": pa.array([str(row) for row in rows]),
        }
        pq.write_table(pa.table(columns), tmp_path / f"part-{99999 + part}-a.parquet", row_group_size=2)
    (tmp_path / "_SUCCESS").touch()
    return tmp_path


def test_rows_are_in_the_order_of_files_and_have_an_index(folder):
    rows = Parquet(folder, "pixels", "digit")
    assert len(rows) == 10
    assert [int(digit) for _, digit in rows] == list(range(10))
    assert torch.equal(rows[7][0], torch.tensor([7.0, 7.5]))
    assert rows[7][1].dtype == torch.int64 and rows[7][1].shape == ()
    assert int(rows[-1][1]) == 9
    with pytest.raises(IndexError):
        rows[10]


def test_lists_may_differ_in_length(folder):
    rows = Parquet(folder).pairs("words", "digit")
    assert [len(words) for words, _ in rows] == list(range(10))
    assert rows[3][0].tolist() == [0, 1, 2]


def test_a_sample_is_a_dict_of_all_columns(tmp_path):
    pq.write_table(pa.table({"x": [1.0, 2.0], "is_new": [True, False]}), tmp_path / "a.parquet")
    assert Parquet(tmp_path)[1] == {
        "x": torch.tensor(2.0, dtype=torch.float64),
        "is_new": torch.tensor(False),
    }


def test_only_groups_that_are_asked_for_are_read(folder):
    rows = Parquet(folder, "pixels", "digit")
    (folder / "part-100000-a.parquet").unlink()
    assert int(rows[4][1]) == 4
    with pytest.raises(FileNotFoundError):
        rows[5]


@pytest.mark.parametrize(
    "columns, said",
    [
        (("name", "digit"), "column name must hold numbers, or lists of numbers, got string"),
        (("pixel", "digit"), "has no column pixel"),
        (("pixels", None), "inputs and target are two columns, or None, got 'pixels' and None"),
    ],
)
def test_what_cannot_be_a_tensor_is_refused(folder, columns, said):
    with pytest.raises(UserError, match=said):
        Parquet(folder, *columns)[0]


@pytest.mark.parametrize(
    "column, said",
    [
        ({"y": [1.0]}, "b.parquet: has no column x"),
        ({"x": [1]}, "b.parquet: column x must hold double as in other files, got int64"),
    ],
)
def test_files_with_other_columns_are_refused(tmp_path, column, said):
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(column), tmp_path / "b.parquet")
    with pytest.raises(UserError, match=said):
        Parquet(tmp_path)


def test_null_is_refused(tmp_path):
    pq.write_table(pa.table({"x": [1.0, None]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column x must hold numbers, got null"):
        Parquet(tmp_path)[0]


def test_a_folder_without_files_is_refused(tmp_path):
    with pytest.raises(UserError, match="holds no"):
        Parquet(tmp_path)
