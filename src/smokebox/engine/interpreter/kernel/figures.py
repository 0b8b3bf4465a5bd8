"""Figures of matplotlib: displayed automatically, as images and as data."""

from __future__ import annotations

import io
import math
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

BACKEND = "smokebox_figures"
# Points of one chart that are included as data.
MAX_POINTS = 10_000


def prepare(matplotlib: Any) -> None:
    """Make matplotlib use this backend, unless the user has chosen one."""
    import os

    if "MPLBACKEND" not in os.environ:
        matplotlib.rcParams["backend"] = f"module://{BACKEND}"


def fill_backend(module: Any) -> None:
    """Make a module a matplotlib backend: Agg, with a `show` that displays open figures."""
    from matplotlib.backends import backend_agg

    public = {name: value for name, value in vars(backend_agg).items() if name[:2] != "__"}
    vars(module).update(public)
    module.show = lambda *_, **__: show_all(module.display)


def show_all(display: Any) -> None:
    """Display the open figures, and close them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    for number in pyplot.get_fignums():
        figure = pyplot.figure(number)
        if figure.axes or figure.texts or figure.images:
            display(figure)
    pyplot.close("all")


def bundle_of(figure: Any) -> dict[str, Any]:
    """Return a figure as an image, and as a chart if it is one."""
    image = io.BytesIO()
    figure.savefig(image, format="png", bbox_inches="tight")
    found: dict[str, Any] = {"text/plain": repr(figure), "image/png": image.getvalue()}
    chart = chart_of(figure)
    if chart is not None:
        found["application/vnd.smokebox.chart+json"] = chart
    return found


def chart_of(figure: Any) -> dict[str, Any] | None:
    """Return the data of the chart or charts of a figure."""
    charts = [one for one in map(_axes_chart, figure.axes) if one is not None]
    if len(charts) > 1:
        return {"type": "superchart", "title": _title(figure), "elements": charts}
    return charts[0] if charts else None


def _axes_chart(axes: Any) -> dict[str, Any] | None:
    for read in (_pie, _bars, _scatter, _lines):
        kind, elements = read(axes)
        if elements:
            return {
                "type": kind,
                "title": axes.get_title() or None,
                "x_label": axes.get_xlabel() or None,
                "y_label": axes.get_ylabel() or None,
                "elements": elements,
            }
    return None


def _lines(axes: Any) -> tuple[str, list[dict[str, Any]]]:
    return "line", [
        _points(line.get_label(), line.get_xdata(), line.get_ydata())
        for line in axes.get_lines()
        if len(line.get_xdata())
    ]


def _scatter(axes: Any) -> tuple[str, list[dict[str, Any]]]:
    found = [one for one in axes.collections if type(one).__name__ == "PathCollection"]
    return "scatter", [
        _points(one.get_label(), *zip(*one.get_offsets().tolist()))  # noqa: B905
        for one in found
        if len(one.get_offsets())
    ]


def _bars(axes: Any) -> tuple[str, list[dict[str, Any]]]:
    names = [tick.get_text() for tick in axes.get_xticklabels()]
    elements: list[dict[str, Any]] = []
    for group in axes.containers:
        if type(group).__name__ != "BarContainer":
            continue
        for index, bar in enumerate(group.patches[:MAX_POINTS]):
            label = names[index] if index < len(names) and names[index] else None
            elements.append(
                {
                    "group": _name(group.get_label()),
                    "label": label or str(_number(bar.get_x() + bar.get_width() / 2)),
                    "value": _number(bar.get_height()),
                }
            )
    return "bar", elements


def _pie(axes: Any) -> tuple[str, list[dict[str, Any]]]:
    wedges = [one for one in axes.patches if type(one).__name__ == "Wedge"]
    return "pie", [
        {
            "label": _name(one.get_label()),
            "angle": _number(abs(one.theta2 - one.theta1)),
        }
        for one in wedges[:MAX_POINTS]
    ]


def _points(label: Any, xs: Any, ys: Any) -> dict[str, Any]:
    pairs = list(zip(xs, ys))[:MAX_POINTS]  # noqa: B905
    return {"label": _name(label), "points": [[_number(x), _number(y)] for x, y in pairs]}


def _name(label: Any) -> str | None:
    # Generated labels begin with an underscore.
    text = str(label)
    return None if not text or text.startswith("_") else text


def _number(value: Any) -> Any:
    try:
        number = float(value)
    except (TypeError, ValueError):
        return str(value)
    return number if math.isfinite(number) else None


def _title(figure: Any) -> str | None:
    title = getattr(figure, "_suptitle", None)
    return title.get_text() if title is not None else None
