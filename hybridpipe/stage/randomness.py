"""Randomness keyed by (seed, step, microbatch, layer), never by rank.

Before each layer runs, the generators are seeded with its key, so that dropout draws the same numbers
under every plan. The process's own random state is as it was afterwards.
"""

import hashlib
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def random_key(seed: int, step: int, microbatch: int, layer: int) -> int:
    """A 63-bit seed, unrelated between neighbouring keys (BLAKE2b)."""
    digest = hashlib.blake2b(struct.pack("<4q", seed, step, microbatch, layer), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def seed_generators(key: int, device: torch.device) -> None:
    """Seed the generators that a layer on `device` draws from."""
    torch.default_generator.manual_seed(key)
    if device.type == "cuda":
        with torch.cuda.device(device):  # else the current device's, which may be another
            torch.cuda.manual_seed(key)


@contextmanager
def preserved_state(device: torch.device) -> Iterator[None]:
    """Put the generators back to where they stood."""
    state = torch.get_rng_state()
    device_state = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.set_rng_state(state)
        if device_state is not None:
            torch.cuda.set_rng_state(device_state, device)
