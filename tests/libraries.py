"""Libraries that tests can do without: which of them are missing, in the words of the skip.

Knows no model. Invariant: the answer is the machine's, whatever this process has imported before.
"""

import subprocess
import sys
from functools import cache
from importlib.util import find_spec

import pytest


def missing(*names: str) -> str | None:
    """Return why libraries cannot be imported here, or None if all are installed."""
    absent = [name for name in names if find_spec(name) is None]
    return f"needs {' and '.join(absent)}, not installed here" if absent else None


@cache
def unusable_transformers() -> str | None:
    """Return why models of transformers cannot be loaded by a fresh process, or None if they can.

    They are loaded at their first use, and so is torchvision where it is installed, which may not fit torch.
    """
    told = missing("transformers")
    if told is None:
        program = "from transformers import BertForSequenceClassification, GPT2LMHeadModel"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        errors = [line for line in done.stderr.splitlines() if "Error: " in line]
        if done.returncode:
            told = f"transformers cannot load its models here: {errors[0]}"
    return told


def skip_without_transformers() -> None:
    """Skip the test where models of transformers cannot be loaded."""
    if reason := unusable_transformers():
        pytest.skip(reason)
