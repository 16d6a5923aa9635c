"""What an error of the user's code says in one line."""

from hybridpipe.errors import told


def test_an_error_is_told_with_where_it_was_raised():
    error = KeyError("labels")
    error.add_note("in loss(outputs, targets) with targets = 3")
    assert told(error) == "KeyError: 'labels'; in loss(outputs, targets) with targets = 3"
    assert told(ZeroDivisionError("by 0")) == "ZeroDivisionError: by 0"
