"""Fragments: Open MPI's settings for large messages between ranks of a host without single copy.

Not known here: MPI itself; only the standard library is imported. Invariant: what the user has set stays.
"""

import os
from collections.abc import MutableMapping

# Where ranks of a host cannot read each other's memory (containers, some virtual machines), a large message
# is copied twice, in fragments of 32 KiB of which three are under way. Each waits until both ranks call MPI,
# which a computing sender's progress thread does now and then: 8 MiB took 60 to 130 ms. These fragments take
# 1.0 to 1.6 ms and 16 MiB of memory a rank (docs/results/transport.md). With single copy there are none.
# `vader` is the name of `sm` in Open MPI 4, and another name for it in 5. Other MPIs ignore both.
FRAGMENTS = {
    "OMPI_MCA_btl_vader_max_send_size": str(2**20),
    "OMPI_MCA_pml_ob1_send_pipeline_depth": "16",
}


def set_fragments(env: MutableMapping[str, str] = os.environ) -> None:
    """Set them, before MPI starts."""
    for name, value in FRAGMENTS.items():
        env.setdefault(name, value)
