"""Draw plots of the measurements. No other module imports matplotlib.

A plot is one SVG file with light and dark colours. The browser chooses by `prefers-color-scheme`. A program that
ignores style sheets shows the light colours. The label of a line is written beside its last point, so no plot needs a
legend.
"""

import contextlib
import importlib.util
import io
from collections.abc import Iterator, Sequence
from typing import Any

from kvtool import process
from kvtool.bench.report import COPY, IN_PLACE, STATIC
from kvtool.errors import MissingToolError

BACKGROUND, INK, GRID = "#ffffff", "#24292f", "#d8dee4"
GREY, BLUE, ORANGE, GREEN = "#6e7781", "#0969da", "#bc4c00", "#1a7f37"
# each colour of the light scheme, with its colour in the dark scheme
_DARK = {
    **{BACKGROUND: "#0d1117", INK: "#e6edf3", GRID: "#30363d"},
    **{GREY: "#9198a1", BLUE: "#58a6ff", ORANGE: "#f0883e", GREEN: "#3fb950"},
}
COLOURS = {STATIC: GREY, COPY: ORANGE, IN_PLACE: BLUE}
BARS = (GREY, BLUE, GREEN)
_FONT = 12  # font size in points
# background of a label; it hides lines that cross the label
_BEHIND_TEXT = {"facecolor": BACKGROUND, "edgecolor": "none", "pad": 1}
_STYLE: Any = {
    **{"figure.constrained_layout.use": True, "font.size": _FONT, "legend.frameon": False, "lines.linewidth": 2},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": GRID, "axes.edgecolor": GRID, "axes.linewidth": 1},
    **{"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": BACKGROUND},
    **{"axes.facecolor": BACKGROUND, "text.color": INK, "axes.labelcolor": INK},
    **{"xtick.color": INK, "ytick.color": INK, "axes.titlelocation": "left", "axes.titlesize": _FONT + 1},
    **{"axes.titleweight": "bold", "axes.titlepad": 12, "figure.titlesize": _FONT + 2, "figure.titleweight": "bold"},
    # Equal numbers must produce equal files: the ids are fixed, and texts are stored as text instead of outlines.
    **{"svg.hashsalt": "kvtool", "svg.fonttype": "none"},
}


def require() -> None:
    """Raise MissingToolError if matplotlib is not installed.

    Call this before the measurements, which can need an hour.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingToolError(
            "matplotlib is not installed",
            why="--out draws plots with it",
            next_step=f"{process.pip_install()} matplotlib, or leave --out out",
        )


@contextlib.contextmanager
def picture(
    name: str, panels: int = 1, *, rows: int = 1, size: tuple[float, float] | None = None
) -> Iterator[tuple[dict[str, bytes], Any]]:
    """Yield the pair `(files, axes)`: draw on the axes, and read the SVG from `files` afterwards.

    `files` is filled on exit from the `with` block.

    panels: the number of axes
    rows: the number of rows that the panels are divided into
    size: the width and the height in inches; a web page shows 8 inches as 768 pixels
    """
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot, which needs a display and has global state

    files: dict[str, bytes] = {}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=size or (max(8.0, 4.0 * panels / rows), 4.5 * rows))
        axes = figure.subplots(rows, panels // rows, squeeze=False).flatten()
        yield files, axes
        for axis in axes:
            label_lines(axis)
        # leave out the date, so that equal numbers produce equal files
        figure.savefig(data := io.BytesIO(), format="svg", metadata={"Date": None})
        files[f"{name}.svg"] = with_dark_scheme(data.getvalue())


def label_lines(axis: Any) -> None:
    """Write the label of each line beside its last point, in the colour of the line, without overlaps."""
    lines = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    if not lines:
        return
    texts = []
    for line in lines:
        x, y = line.get_xdata()[-1], line.get_ydata()[-1]
        where = {"textcoords": "offset points", "va": "center", "annotation_clip": False, "bbox": _BEHIND_TEXT}
        texts.append(axis.annotate(line.get_label(), (x, y), (8, 0), color=line.get_color(), **where))
    axis.figure.draw_without_rendering()  # lay out the figure, which decides where each point is
    pixels_per_point = axis.figure.dpi / 72
    heights = [axis.transData.transform(text.xy)[1] / pixels_per_point for text in texts]
    for text, height, moved in zip(texts, heights, spread(heights, 1.3 * _FONT), strict=True):
        text.set_position((8, moved - height))


def name_speed_axes(axis: Any, title: str) -> None:
    """Name the axes of a plot of tokens per second against the depth, and let both begin at 0."""
    axis.set(title=title, xlabel="tokens in the context", ylabel="tokens per second", ylim=(0, None), xlim=(0, None))
    axis.xaxis.set_major_formatter(thousands)


def mark_tokens(axis: Any, n_ctx: int) -> None:
    """Let the horizontal axis end at a full context, and mark each quarter."""
    axis.set(xlim=(0, n_ctx), xticks=[n_ctx * quarter // 4 for quarter in range(5)])
    axis.xaxis.set_major_formatter(thousands)


def thousands(value: float, _position: int) -> str:
    """Format a mark of an axis with separators, for example 32,768."""
    return f"{value:,.0f}"


def spread(heights: Sequence[float], distance: float) -> list[float]:
    """Return heights that are at least `distance` apart.

    The result has the same order as the given heights, and is close to them. It keeps the labels of lines apart.
    """
    order = sorted(range(len(heights)), key=heights.__getitem__)
    groups: list[list[int]] = []  # neighbours that would overlap; a group is centred at the mean of its heights

    def bottom(group: list[int]) -> float:
        return sum(heights[i] for i in group) / len(group) - distance * (len(group) - 1) / 2

    for index in order:
        groups.append([index])
        while len(groups) > 1 and bottom(groups[-1]) < bottom(groups[-2]) + distance * len(groups[-2]):
            groups[-2:] = [groups[-2] + groups[-1]]
    moved = [0.0] * len(heights)
    for group in groups:
        for place, index in enumerate(group):
            moved[index] = bottom(group) + distance * place
    return moved


def label_bars(axis: Any, texts: Sequence[str]) -> None:
    """Write a text at the end of each horizontal bar, in the order in which the bars were drawn."""
    bars = (bar for container in axis.containers for bar in container)
    for bar, text in zip(bars, texts, strict=True):
        end = bar.get_x() + bar.get_width(), bar.get_y() + bar.get_height() / 2
        side = {"ha": "right"} if bar.get_width() < 0 else {"ha": "left"}
        offset = (-4 if bar.get_width() < 0 else 4, 0)
        axis.annotate(text, end, offset, textcoords="offset points", va="center", annotation_clip=False, **side)


def with_dark_scheme(svg: bytes) -> bytes:
    """Add a style sheet with dark colours to an SVG with light colours."""
    rules = "".join(
        f'[style*="{kind}: {light}"]{{{kind}:{dark} !important}}'
        for light, dark in _DARK.items()
        for kind in ("fill", "stroke")
    )
    return svg.replace(b"</style>", f"@media (prefers-color-scheme: dark){{{rules}}}</style>".encode(), 1)
