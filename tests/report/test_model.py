"""The text about a model says its facts, and nothing about what is not there."""

import re

import pytest

from hybridpipe.model.explanation import ForbiddenCut, LayerFacts, ModelExplanation
from hybridpipe.planning.profile import SharedParameter
from hybridpipe.report.model import model_text

FIRST = LayerFacts("embed", 1200, ("embed",), 2048, 2, 3, ("ids", "mask"))
BOTH = LayerFacts("block..norm", 0, ("block", "norm"), 512, 1)
LAST = LayerFacts("head", 1200, ("head",), 0, 0)
FULL = ModelExplanation(
    "recorded",
    (FIRST, BOTH, LAST),
    forbidden=(ForbiddenCut("block", "norm", 1, "m.py:7: why not"), ForbiddenCut("a", "z", 4, "m.py:9: no")),
    opened={"outer": "m.py:3: it takes tensors in a Box"},
    free=("arange (m.py:1)",),
    guards=("m.py:2: __bool__ gave True",),
    draws=("block", "dropout (m.py:5)"),
    shared=(SharedParameter("embed.weight", (0, 2), 4800), SharedParameter("norm.mean", (1, 2), 0, False)),
    unused=("idle.weight",),
)


def row(text: str, name: str) -> list[str]:
    (line,) = (line for line in text.splitlines() if re.match(rf"\d+ +{re.escape(name)} ", line))
    return re.split(r"  +", line.strip())


def test_a_layer_is_a_row():
    text = model_text(FULL)
    assert text.startswith("recorded: 3 layers, so up to 3 stages\n")
    assert row(text, "embed") == ["0", "embed", "1,200", "2.05 kB, 2 tensor(s)", "3", "ids, mask"]
    assert row(text, "block..norm") == ["1", "block..norm", "-", "512 B, 1 tensor(s)", "-", "-"]
    assert row(text, "head") == ["2", "head", "1,200", "-", "-", "-"]


@pytest.mark.parametrize(
    "line",
    [
        "  block..norm: block, norm",
        "  between block and norm: m.py:7: why not",
        "  between a and z (4 places): m.py:9: no",
        "  outer: m.py:3: it takes tensors in a Box",
        "free, since it follows from the inputs alone: arange (m.py:1)",
        "  m.py:2: __bool__ gave True",
        "draws random numbers: block, dropout (m.py:5)",
        "  embed.weight (4.8 kB) by embed, head",
        "  norm.mean (0 B) by block..norm, head; they stay in one stage",
        "not used by the forward: idle.weight",
    ],
)
def test_each_fact_is_a_line(line):
    assert line in model_text(FULL).splitlines()


def test_one_layer_says_why():
    found = ModelExplanation("one layer", (LayerFacts("Net", 12),), "m.py:8: item reads data")
    lines = model_text(found).splitlines()
    assert lines[:2] == [
        "one layer, so one stage",
        "why: m.py:8: item reads data",
    ]
    assert row(model_text(found) + " ", "Net") == ["0", "Net", "12"] and len(lines) == 6


def test_what_a_sequential_sends_is_not_known_without_a_measurement():
    text = model_text(ModelExplanation("nn.Sequential", (LayerFacts("0", 12), LayerFacts("1", 3))))
    assert row(text, "0") == ["0", "0", "12", "-"] and "`hybridpipe profile` measures it" in text
    assert "free" not in text and "why" not in text
