"""Random numbers keyed by (seed, step, microbatch, layer), never by rank: dropout is equal under all plans.

Each layer's generators are seeded with its key before it runs; a recomputed forward draws the same numbers.
Invariant: the process's own random state is the same after a run as before it.
"""

import hashlib
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn


def random_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """Return a seed of 63 bits; neighbouring keys give unrelated seeds (BLAKE2b)."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def may_draw_from_python(function: object) -> bool:
    """Return True if a function or module may draw from Python's `random` or NumPy's legacy generator.

    Torch's own functions and modules without hooks draw from torch's generators only.
    """
    if not isinstance(function, nn.Module):
        return not str(getattr(function, "__module__", "")).startswith("torch.")
    return any(
        type(module).__module__.split(".")[0] != "torch"
        or bool(module._forward_hooks or module._forward_pre_hooks)
        for module in function.modules()
    )


def seed_generators(key: int, device: torch.device, python_too: bool) -> None:
    """Seed the generators that a layer on `device` draws from.

    Args:
        python_too: seed Python's and NumPy's generators as well, which takes five times as long.
    """
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        with torch.cuda.device(device):  # otherwise the current device's generator, which may be another one
            torch.cuda.manual_seed(key)
    if python_too:
        random.seed(key)
        np.random.seed(key % 2**32)


def random_state(device: torch.device) -> Tensor:
    """Return the state of the torch generator that layers on a device draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def seed_place(
    seed: int, step: int, microbatch: int, place: int, device: torch.device, python_too: bool
) -> None:
    """Seed the generators for a layer of one microbatch (`random_key`, `seed_generators`)."""
    seed_generators(random_key(seed, step, microbatch, place), device, python_too)


@contextmanager
def preserved_state(device: torch.device, python_too: bool) -> Iterator[None]:
    """Restore the generators' states after this context.

    Args:
        python_too: restore Python's and NumPy's as well, which takes 0.1 ms.
    """
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    others = (random.getstate(), np.random.get_state()) if python_too else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])
