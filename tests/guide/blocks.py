"""Blocks of code in README.md and the guide, and the commands in them.

Knows Markdown and the words of a shell; nothing of hybridpipe. Invariant: every fenced block is one `Block`.
"""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[2]
README = "README.md"
GUIDE = "docs/guide/"
FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "console")  # in the last one commands stand behind "$ ", among what they print


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Args:
        page: its path in the repository.
        line: of the opening fence, from 1.
        language: as the fence names it; empty if it names none.
        text: what stands between the fences.
    """

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a block for a shell, without comments; of a whole script only this project's."""
        if self.language not in SHELL:
            return []
        lines = re.sub(r"\\\n *", "", self.text).splitlines()
        if self.text.startswith("#!"):  # a whole script: what it starts of this project
            lines = re.findall(r"^(?!#).*?\b(hybridpipe .*)", "\n".join(lines), re.MULTILINE)
        if self.language == "console":
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        bare = (re.sub(r"(^|\s+)#(\s.*)?$", "", line) for line in lines)
        return [part.strip() for line in bare for part in re.split(r" && | \| ", line) if part.strip()]


def words(command: str) -> list[str]:
    """Return the words of a command, without a file that its output goes to."""
    given = shlex.split(command)
    return given[: given.index(">")] if ">" in given else given


def blocks_of(page: str, text: str) -> list[Block]:
    """Return the blocks of a page in order."""
    return [
        Block(page, text.count("\n", 0, each.start()) + 1, each[2], dedent(each[3]))
        for each in FENCED.finditer(text)
    ]


PAGES = {
    name: blocks_of(name, (ROOT / name).read_text())
    for name in [README, *(f"{GUIDE}{path.name}" for path in sorted((ROOT / GUIDE).glob("*.md")))]
}
BLOCKS = [block for blocks in PAGES.values() for block in blocks]
