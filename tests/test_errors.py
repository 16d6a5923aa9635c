"""What an error of the user's code says in one line."""

import pytest

from hybridpipe.errors import noting, told


def test_an_error_is_told_with_where_it_was_raised():
    with pytest.raises(KeyError) as caught, noting(lambda: "in loss(outputs, targets) with targets = 3"):
        raise KeyError("labels")
    assert told(caught.value) == "KeyError: 'labels'; in loss(outputs, targets) with targets = 3"
    assert told(ZeroDivisionError("by 0")) == "ZeroDivisionError: by 0"
