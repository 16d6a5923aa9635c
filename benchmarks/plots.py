"""Plots: what benchmarks draw with; imported at their top, so that it is missed before any job."""

try:
    import matplotlib
except ModuleNotFoundError:
    raise SystemExit("benchmarks: matplotlib is not installed; pip install -e '.[benchmarks]'") from None

matplotlib.use("svg")
from matplotlib import pyplot

COLORS = matplotlib.colormaps["tab20"].colors  # where ten do not do


def svg_axes(**options):
    """A figure that is written as SVG, and its axes."""
    return pyplot.subplots(**options)
