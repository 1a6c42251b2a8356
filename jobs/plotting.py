"""Plots of reports, without a screen."""

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def bar_chart(values: dict[str, float], path: Path, *, unit: str) -> None:
    """Horizontal bars, one a name, labelled with their values; written to `path` as PNG."""
    figure = Figure(figsize=(7.0, 0.8 + 0.45 * len(values)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    bars = axes.barh(list(values), list(values.values()), color="#3b6ea5")
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)
