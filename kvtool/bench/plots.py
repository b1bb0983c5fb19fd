"""Plots: memory against tokens, growth against what the machine can do. The only importer of matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from kvtool.bench.plan import COPY, IN_PLACE, MODES, STATIC
from kvtool.bench.summary import Depth, Growth, Summary
from kvtool.errors import MissingToolError

GIB = 2**30
_COLOURS = {STATIC: "#777777", COPY: "#d9822b", IN_PLACE: "#1f77b4"}
_MARKS = {STATIC: "", COPY: "s", IN_PLACE: "o"}


def require() -> None:
    """Raises MissingToolError without matplotlib: before an hour is spent measuring."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise MissingToolError(
            "matplotlib is not installed",
            why="--out draws plots with it",
            next_step="pip install 'kvtool[bench]', or leave --out out",
        ) from err


def draw(summary: Summary) -> dict[str, bytes]:
    """The plots by file name, each as SVG and PNG; one without data is left out."""
    pictures: dict[str, bytes] = {}
    if any(d.mode != STATIC for d in summary.depths):
        pictures |= _saved("memory", _memory(summary.depths))
    if summary.growths:
        pictures |= _saved("growth", _growth(summary.growths))
    return pictures


def _saved(name: str, figure: Any) -> dict[str, bytes]:
    import matplotlib

    out: dict[str, bytes] = {}
    # the same numbers give the same file: no date, no random ids; text stays text
    with matplotlib.rc_context({"svg.hashsalt": "kvtool", "svg.fonttype": "none"}):
        for kind, metadata in (("svg", {"Date": None}), ("png", {"Software": None})):
            data = io.BytesIO()
            figure.savefig(data, format=kind, metadata=metadata, dpi=110)
            out[f"{name}.{kind}"] = data.getvalue()
    return out


def _panels(count: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(4.6 * count, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)
    return figure, list(axes[0])


def _memory(depths: Sequence[Depth]) -> Any:
    models = list(dict.fromkeys(d.model for d in depths))
    figure, axes = _panels(len(models), 4.0)
    for axis, model in zip(axes, models, strict=True):
        for mode in MODES:
            rows = [d for d in depths if (d.model, d.mode) == (model, mode)]
            if rows:
                axis.plot(
                    [d.depth for d in rows],
                    [d.committed / GIB for d in rows],
                    color=_COLOURS[mode],
                    marker=_MARKS[mode],
                    label=mode,
                )
        used = [d for d in depths if (d.model, d.mode) == (model, IN_PLACE)]
        axis.plot([d.depth for d in used], [d.used / GIB for d in used], "k:", linewidth=1, label="used")
        if not any((d.model, d.mode) == (model, STATIC) for d in depths) and used:
            axis.axhline(used[0].reserved / GIB, color=_COLOURS[STATIC], label="static (reserved)")
        axis.set(title=model, xlabel="tokens", ylabel="KV cache, GiB", ylim=(0, None), xlim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()
    return figure


def _growth(growths: Sequence[Growth]) -> Any:
    figure, axes = _panels(2, 3.6)
    for axis, mode, limit in zip(
        axes, (IN_PLACE, COPY), ("commit of the same pages", "memcpy of the same bytes"), strict=True
    ):
        rows = [g for g in growths if g.mode == mode]
        at = range(len(rows))
        axis.bar([x - 0.2 for x in at], [g.seconds for g in rows], 0.4, color=_COLOURS[mode], label="growth")
        axis.bar([x + 0.2 for x in at], [g.limit for g in rows], 0.4, color="#bbbbbb", label=limit)
        axis.set_xticks(list(at), [g.model for g in rows], fontsize=8)
        cells = f" to {rows[0].cells} cells" if rows else ""
        axis.set(title=f"growth {mode}{cells}", ylabel="seconds", ylim=(0, None))
        axis.grid(alpha=0.3, axis="y")
        axis.legend(fontsize=8)
    return figure
