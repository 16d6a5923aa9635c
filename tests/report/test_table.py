"""Tables on terminals of some width: what does not fit is left out by importance, and named."""

import pytest

from hybridpipe.report.table import table

ROWS = [{"stage": "0", "layers": "0 .. 3 (4)", "compute": "17 ms", "exposed": "-", "memory": "3 MB of 8 GB"}]


@pytest.mark.parametrize("columns", ["", "0", "no", "80"])
def test_a_table_that_fits_is_whole(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert table(ROWS).splitlines()[0].split() == ["stage", "layers", "compute", "exposed", "memory"]


@pytest.mark.parametrize(
    "columns, left_out",
    [(50, "exposed"), (30, "exposed, memory"), (20, "exposed, memory, compute"), (5, None)],
)
def test_a_wide_one_leaves_columns_out_and_names_them(monkeypatch, columns, left_out):
    monkeypatch.setenv("COLUMNS", str(columns))
    *lines, last = table(ROWS).splitlines()
    assert last == f"(left out at {columns} columns: {left_out or 'exposed, memory, compute'})"
    assert left_out is None or max(map(len, lines)) <= columns, lines
