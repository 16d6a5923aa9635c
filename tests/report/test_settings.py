import tomllib

from hypothesis import given
from hypothesis import strategies as st

from hybridpipe.report.settings import toml_text

TEXT = st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


def test_a_config_reads_as_it_was_written():
    settings = {
        "model": {"factory": "models:net", "args": {"width": 16, "bias": True}},
        "train": {"epochs": 2},
    }
    text = '[model]\nfactory = "models:net"\nargs = { width = 16, bias = true }\n\n[train]\nepochs = 2'
    assert toml_text(settings) == text


TABLE = st.dictionaries(TEXT, VALUES, max_size=4)


@given(st.dictionaries(st.sampled_from(["model", "train"]), TABLE | st.lists(TABLE, min_size=1, max_size=3)))
def test_what_is_written_is_read_back(tables):
    assert tomllib.loads(toml_text(tables)) == tables
