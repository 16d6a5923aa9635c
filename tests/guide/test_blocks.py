"""Every block of README and the guide is run or checked, or stands in a short table with the reason.

Of Python `test_python.py` runs each page, from TOML `test_toml.py` makes configurations. Commands are checked
here, and `test_shell.py` runs those that are cheap. What none of them can run stands in `exceptions.py`.
"""

import re

import pytest

from tests.guide import exceptions
from tests.guide.blocks import BLOCKS, ROOT, SHELL, blocks_of, words
from tests.guide.commands import Wrong, check
from tests.guide.exceptions import is_excused, is_foreign

RUN = ("python", "toml", *SHELL)
SHOWN = ("text", "", "diff")  # what is printed, or what has changed


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.place)
def test_a_block_is_in_a_language_that_is_known(block):
    known = (*RUN, *SHOWN)
    assert block.language in known, f"{block.place}: give the block one of the languages {known}"


COMMANDS = [(block, command) for block in BLOCKS for command in block.commands if not is_excused(block)]


@pytest.mark.parametrize("block, command", COMMANDS, ids=lambda each: getattr(each, "place", None))
def test_a_command_names_what_there_is(block, command):
    if is_foreign(command):
        return
    try:
        check(words(command))
    except Wrong as wrong:
        remedy = "mend it, teach tests/guide/commands.py, or say why not in tests/guide/exceptions.py"
        pytest.fail(f"{block.place}: {command}: {wrong}; {remedy}", pytrace=False)


def test_the_quick_start_names_what_there_is():
    script = (ROOT / "launch/quickstart").read_text().replace("\\\n", "")
    compares, predicts = re.findall(r'^ *"\$python" -m (hybridpipe .*?)(?: \||$)', script, re.MULTILINE)
    check(words(compares.removesuffix('"$@"')))
    check(words(predicts.replace("$rate", "1Gbit")))


@pytest.mark.parametrize("page, text", exceptions.BLOCKS)
def test_an_excused_block_is_there(page, text):
    assert any(is_excused(block) for block in BLOCKS if block.page == page and block.text.startswith(text))


@pytest.mark.parametrize("beginning", exceptions.COMMANDS)
def test_an_excused_command_is_there(beginning):
    assert any(command.startswith(beginning) for _, command in COMMANDS)


PAGE = """Text
```bash
hybridpipe train C --set a.b="x y" \\
  --out D   # where
export A="b c" && launch/x > file
```
- in a list:
  ```console
  $ hybridpipe doctor | head
  ok
  ```
"""


def test_blocks_and_their_commands_are_found():
    first, second = blocks_of("page.md", PAGE)
    assert (first.line, first.language, second.line) == (2, "bash", 8)
    assert second.text == "$ hybridpipe doctor | head\nok\n" and second.commands == [
        "hybridpipe doctor",
        "head",
    ]
    assert first.commands == [
        'hybridpipe train C --set a.b="x y" --out D',
        'export A="b c"',
        "launch/x > file",
    ]
    assert [words(each) for each in first.commands[1:]] == [["export", "A=b c"], ["launch/x"]]


@pytest.mark.parametrize(
    "command, told",
    [
        ("hybridpipe train", "is refused"),
        ("hybridpipe launch --ranks 2 -- train C --outt D", "is refused"),
        ("launch/mpirun.sh C", "number of ranks"),
        ("HYBRIDPIPE_NO_SUCH=1 hybridpipe doctor", "HYBRIDPIPE_NO_SUCH"),
        ("srun -n 4 --mpi=pmix hybridpipe docter", "is refused"),
        ("launch/setup --extra test", "has no option --extra"),
        ("pip install 'hybridpipe[none]'", "no extra none"),
        ("python missing.py", "no such program"),
        ("mpiexec -n 4 python train.py", "no test knows"),
    ],
)  # fmt: skip
def test_a_wrong_command_is_found(command, told):
    with pytest.raises(Wrong, match=told):
        check(words(command))
