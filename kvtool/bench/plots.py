"""Draw plots of the measurements. No other module imports matplotlib."""

import contextlib
import importlib.util
import io
from collections.abc import Iterator
from typing import Any

from kvtool import process
from kvtool.bench.report import COPY, IN_PLACE, STATIC
from kvtool.errors import MissingToolError

COLOURS = {STATIC: "#777777", COPY: "#d9822b", IN_PLACE: "#1f77b4"}
BARS = ("#777777", "#1f77b4", "#2ca02c")
_STYLE: Any = {
    **{"axes.grid": True, "grid.alpha": 0.3, "legend.fontsize": 8, "figure.constrained_layout.use": True},
    # Make equal numbers produce equal files: no random ids, and text stays text.
    **{"svg.hashsalt": "kvtool", "svg.fonttype": "none", "savefig.dpi": 110},
}


def require() -> None:
    """Raise MissingToolError without matplotlib, before an hour of measurements."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingToolError(
            "matplotlib is not installed",
            why="--out draws plots with it",
            next_step=f"{process.pip_install()} matplotlib, or leave --out out",
        )


@contextlib.contextmanager
def picture(name: str, panels: int) -> Iterator[tuple[dict[str, bytes], Any]]:
    """Yield `(files, axes)` with `panels` axes to draw on. On exit, `files` holds the SVG and the PNG."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    files: dict[str, bytes] = {}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(1.6 + 3.0 * panels, 4.0))
        axes = figure.subplots(1, panels, squeeze=False)[0]
        yield files, axes
        for axis in (axis for axis in axes if axis.get_legend_handles_labels()[1]):
            axis.legend()
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):  # no date either
            figure.savefig(data := io.BytesIO(), format=kind, metadata=metadata)
            files[f"{name}.{kind}"] = data.getvalue()
