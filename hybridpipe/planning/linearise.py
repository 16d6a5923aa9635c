"""The older name of `hybridpipe.planning.graph.linearise`."""

from hybridpipe.planning.graph.linearise import narrow_order

__all__ = ["narrow_order"]
