"""Plots of reports, without a screen."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tuning.bootstrap import Interval

_COLOUR = "#3b6ea5"


def bar_chart(values: dict[str, float], path: Path, *, unit: str) -> None:
    """Horizontal bars, one a name, labelled with their values; written to `path` as PNG."""
    figure = _figure(7.0, 0.8 + 0.45 * len(values))
    axes = figure.subplots()
    bars = axes.barh(list(values), list(values.values()), color=_COLOUR)
    axes.bar_label(bars, fmt="%.1f", padding=4)
    axes.invert_yaxis()
    axes.set_xlabel(unit)
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def line_charts(x: Sequence[int], lines: dict[str, Sequence[float | None]], path: Path, *, x_label: str) -> None:
    """Charts side by side, one a line, named by its unit, each from 0 up; a value that is None leaves a gap."""
    figure = _figure(3.6 * len(lines), 3.0)
    for axes, (label, values) in zip(figure.subplots(1, len(lines), squeeze=False)[0], lines.items(), strict=True):
        shown = [float("nan") if value is None else value for value in values]
        axes.plot(range(len(x)), shown, marker="o", color=_COLOUR)
        for at, value in enumerate(values):
            if value is not None:
                axes.annotate(f"{value:.1f}", (at, value), xytext=(-8, 7), textcoords="offset points", ha="center")
        axes.set_xticks(range(len(x)), [str(tick) for tick in x])
        axes.set_xlabel(x_label)
        axes.set_ylabel(label)
        axes.margins(x=0.15, y=0.18)
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


@dataclass(frozen=True)
class IntervalPanel:
    """Named estimates with their intervals, and where nothing would have changed."""

    rows: Mapping[str, Interval]
    reference: float
    x_label: str


def interval_charts(panels: Sequence[IntervalPanel], path: Path, *, title: str) -> None:
    """Panels one above the other: a dot with its interval for each name, a hollow one where there is no interval."""
    heights = [1.0 + 0.45 * len(panel.rows) for panel in panels]
    figure = _figure(7.0, 0.4 + sum(heights))
    figure.suptitle(fill(title, 80), fontsize="medium")
    column = figure.subplots(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for axes, panel in zip(column, panels, strict=True):
        for place, interval in enumerate(panel.rows.values()):
            _draw_interval(axes, place, interval)
        axes.axvline(panel.reference, color="grey", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(panel.rows)), list(panel.rows))
        axes.set_ylim(len(panel.rows) - 0.5, -0.75)
        axes.set_xlabel(fill(panel.x_label, 60))
        axes.margins(x=0.2)
        axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def _draw_interval(axes: Axes, place: int, interval: Interval) -> None:
    told = f"{interval.value:.2f}"
    if interval.ends is None:
        told += ", no interval"
    else:
        axes.plot(interval.ends, [place, place], color=_COLOUR, linewidth=2)
    filling = "white" if interval.ends is None else _COLOUR
    axes.plot([interval.value], [place], marker="o", color=_COLOUR, markerfacecolor=filling)
    axes.annotate(told, (interval.value, place), xytext=(0, 7), textcoords="offset points", ha="center")


def step_charts(charts: Mapping[str, Mapping[str, Sequence[float]]], path: Path, *, x_label: str, y_label: str) -> None:
    """Charts side by side, one a title, each with a line a name over 1, 2, 3, ...; a line of one value is a level."""
    figure = _figure(4.6 * len(charts), 3.4)
    for axes, (title, lines) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        longest = max(map(len, lines.values()))
        for name, values in lines.items():
            if len(values) == 1:
                axes.plot([1, longest], [values[0]] * 2, linestyle=":", label=name)
            else:
                axes.step(range(1, len(values) + 1), values, where="post", label=name)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def trade_off_chart(
    points: Mapping[str, tuple[float, float]], path: Path, *, reference: str, x_label: str, y_label: str
) -> None:
    """Named points from 0 up, joined in the order of x; `reference` is one of them, with a line at its height."""
    figure = _figure(6.4, 3.8)
    axes = figure.subplots()
    axes.axhline(points[reference][1], color="grey", linewidth=1, linestyle="--")
    others = sorted(point for name, point in points.items() if name != reference)
    axes.plot([x for x, _ in others], [y for _, y in others], color=_COLOUR, linewidth=1, alpha=0.5)
    for number, name in enumerate(sorted(points, key=lambda name: points[name])):
        x, y = points[name]
        axes.scatter([x], [y], color="grey" if name == reference else _COLOUR, zorder=3, clip_on=False)
        side = (7, -14) if number % 2 else (7, 6)  # labels of neighbours keep clear of each other
        axes.annotate(name, (x, y), xytext=side, textcoords="offset points")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.margins(x=0.18, y=0.15)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)


def _figure(width: float, height: float) -> Figure:
    """Inches, with a canvas that needs no screen."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def line_with_diagonal(points: Sequence[tuple[float, float]], path: Path, *, labels: tuple[str, str]) -> None:
    """Points joined by a line, and the diagonal on which x and y are equal."""
    figure = _figure(4.4, 4.0)
    axes = figure.subplots()
    most = max(max(point) for point in points)
    axes.plot([0.0, most], [0.0, most], color="#999999", linewidth=1)
    axes.plot([x for x, _ in points], [y for _, y in points], marker="o", color=_COLOUR)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.spines[["top", "right"]].set_visible(False)
    _write(figure, path)
