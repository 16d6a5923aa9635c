"""HTML: a page of sections as one self-contained file.

Known here is the form: figures, lines, tables, listings, charts and bars; not what they are of. Invariants:
every text is escaped, no address leads out of the page but links to its neighbours, and no script is needed.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jinja2 import Environment, PackageLoader, StrictUndefined

from hybridpipe.planning.draw import COLOURS
from hybridpipe.run_folder.page.bar_charts import StackedBars, TimelineView
from hybridpipe.run_folder.page.curves import Chart
from hybridpipe.version import __version__

TEMPLATE = "page.html"


@dataclass(frozen=True)
class Lines:
    """Sentences, one a line."""

    lines: tuple[str, ...]
    kind: str = "lines"


@dataclass(frozen=True)
class Table:
    """Rows of cells by heading. Columns of numbers stand to the right.

    Args:
        note: below the table.
        chosen: index of the row to emphasise.
        links: address by the text of a cell.
        title: where the table is folded up until it is opened; empty: it is open.
    """

    rows: Sequence[Mapping[str, str]]
    note: str = ""
    chosen: int | None = None
    links: Mapping[str, str] | None = None
    title: str = ""
    kind: str = "table"

    @property
    def columns(self) -> dict[str, str]:
        """Style of each column by heading: "number" or "words"."""
        return {
            name: "number" if all(map(_NUMBER.fullmatch, (row[name] for row in self.rows))) else "words"
            for name in (self.rows[0] if self.rows else ())
        }


# A number, perhaps with a unit and "of" another one, or a dash for none; not the name of a plan, such as 2-1.
_NUMBER = re.compile(r"[-–]?|[-+−±]?\d[\d,.]*(e[-+]?\d+)?([%×x]| [\w/]+)?( of .*)?( \(.*\))?")

_UNBROKEN = re.compile(r"(?<=\d) (?!of |\()|(?<= x) ")  # a space within a number with its unit, or 4 x 16


@dataclass(frozen=True)
class Listing:
    """Text whose lines stay as they are."""

    text: str
    kind: str = "listing"


@dataclass(frozen=True)
class Charts:
    """Charts beside each other, where there is room."""

    charts: tuple[Chart, ...]
    kind: str = "charts"


Block = Lines | Table | Listing | Charts | StackedBars | TimelineView


@dataclass(frozen=True)
class Section:
    """A part of the page, with its heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Figure:
    """A number that matters, with what it is and what it is to be compared with."""

    name: str
    value: str
    note: str = ""


@dataclass(frozen=True)
class Page:
    """A report.

    Args:
        of: what it is a report of, such as "training".
        facts: short texts below the title.
        warnings: what a reader must know; None: nothing is known of warnings.
    """

    title: str
    of: str
    facts: tuple[str, ...]
    figures: tuple[Figure, ...]
    warnings: tuple[str, ...] | None
    sections: tuple[Section, ...]


def render(page: Page) -> str:
    """Return the page as HTML. Sections and blocks without content are left out."""
    environment = Environment(
        loader=PackageLoader("hybridpipe", "run_folder/page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["percent"] = lambda share: f"{share:.2f}%"
    environment.filters["joined"] = lambda cell: _UNBROKEN.sub("\u00a0", cell)
    return environment.get_template(TEMPLATE).render(page=page, colours=COLOURS, version=__version__)
