"""Layout of tables as text, within the width of the terminal.

Not known here: what the tables hold. Invariant: a column that is left out is named below the table.
"""

import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from tabulate import tabulate

# Columns that a narrow terminal does without, the least important first; then the last ones.
LEAST = (
    "exposed",
    "link behind",
    "receives",
    "proposed by",
    "in flight",
    "bubble",
    "cuts after layer",
    "sends",
)


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Lay out rows as text; on a narrow terminal the least important columns are left out, and named."""
    kept, left_out = [dict(row) for row in rows], []
    width = shutil.get_terminal_size((0, 0)).columns  # $COLUMNS comes first; 0: of no terminal
    while True:
        text = tabulate(kept, headers="keys", disable_numparse=True)
        names = list(kept[0]) if kept else []
        if not width or len(names) < 3 or max(map(len, text.splitlines())) <= width:
            break
        least = next((name for name in LEAST if name in names), names[-1])
        left_out.append(least)
        kept = [{name: each for name, each in row.items() if name != least} for row in kept]
    return f"{text}\n(left out at {width} columns: {', '.join(left_out)})" if left_out else text
