"""Plots: memory against tokens, growth against what the machine can do. The only importer of matplotlib."""

import importlib.util
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvtool.bench.runs import COPY, IN_PLACE, MODES, STATIC, Row
from kvtool.errors import MissingToolError

if TYPE_CHECKING:
    from kvtool.bench.serve import Served
    from kvtool.bench.types import Change, Held, Loss

GIB = 2**30
_COLOURS = {STATIC: "#777777", COPY: "#d9822b", IN_PLACE: "#1f77b4"}
_THREE = ("#777777", "#1f77b4", "#2ca02c")  # bars
_MARKS = {STATIC: "", COPY: "s", IN_PLACE: "o"}


def require() -> None:
    """Raises MissingToolError without matplotlib: before an hour is spent measuring."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingToolError(
            "matplotlib is not installed",
            why="--out draws plots with it",
            next_step="pip install 'kvtool[bench]', or leave --out out",
        )


def draw(rows: Sequence[Row]) -> dict[str, bytes]:
    depths = [r for r in rows if r.moment == "depth"]
    return {**_saved("memory", _memory(depths)), **_saved("growth", _growth([r for r in depths if r.growth_limit]))}


def _memory(depths: Sequence[Row]) -> Any:
    figure, (axis,) = _panels(1)
    for mode in MODES:
        rows = [r for r in depths if r.mode == mode]
        at = [r.depth for r in rows]
        axis.plot(at, [r.committed / GIB for r in rows], color=_COLOURS[mode], marker=_MARKS[mode], label=mode)
        if mode == IN_PLACE:
            axis.plot(at, [r.used / GIB for r in rows], "k:", linewidth=1, label="used")
    if not any(r.mode == STATIC for r in depths):
        axis.axhline(depths[0].reserved / GIB, color=_COLOURS[STATIC], label="static (reserved)")
    axis.set(xlabel="tokens", ylabel="KV cache, GiB", ylim=(0, None), xlim=(0, None))
    axis.legend()
    return figure


def _growth(grown: Sequence[Row]) -> Any:
    figure, (axis,) = _panels(1)
    for mode, limit in ((IN_PLACE, "commit of the same pages"), (COPY, "memcpy of the same bytes")):
        rows = [r for r in grown if r.mode == mode]
        at, colour = [r.depth for r in rows], _COLOURS[mode]
        axis.plot(at, [r.growth_seconds for r in rows], color=colour, marker=_MARKS[mode], label=f"growth {mode}")
        axis.plot(at, [r.growth_limit for r in rows], color=colour, linestyle=":", label=limit)
    axis.set(xlabel="tokens", ylabel="seconds, all growths up to there", ylim=(0, None), xlim=(0, None))
    axis.legend(fontsize=8)
    return figure


def draw_serve(rows: Sequence["Served"]) -> dict[str, bytes]:
    """A panel for each thing that sharing a prompt is to save."""
    panels = {
        "resident, MiB": [(row.resident or 0) / 2**20 for row in rows],
        "prompt tokens computed": [row.computed for row in rows],
        "seconds to the first token": [row.first or 0.0 for row in rows],
    }
    figure, axes = _panels(len(panels))
    for axis, (title, values) in zip(axes, panels.items(), strict=True):
        axis.bar([row.mode for row in rows], values, color=_THREE[: len(rows)])
        axis.set(title=title, ylim=(0, None))
    return _saved("serve", figure)


def draw_types(changes: Sequence["Change"], held: Sequence["Held"], losses: Sequence["Loss"]) -> dict[str, bytes]:
    """The time of each change beside memcpy's; tokens within the budget; what each model lost, both ways."""
    figure, (times, tokens, lost) = _panels(3)
    places = range(len(changes))
    times.barh([at - 0.2 for at in places], [c.seconds for c in changes], 0.4, color=_COLOURS[IN_PLACE], label="change")
    times.barh([at + 0.2 for at in places], [c.memcpy for c in changes], 0.4, color=_COLOURS[STATIC], label="memcpy")
    times.set(yticks=places, yticklabels=[f"{c.types}\n{c.mode}" for c in changes], xlabel="seconds")
    tokens.bar([h.cache for h in held], [h.tokens for h in held], color=_THREE[: len(held)])
    tokens.set(ylabel=f"tokens in {held[0].budget / 2**20:.0f} MiB")
    for types in dict.fromkeys(loss.types for loss in losses):
        there = [loss for loss in losses if loss.types == types and min(loss.start, loss.changed) > 0]
        lost.loglog([loss.start for loss in there], [loss.changed for loss in there], ".", label=types)
    starts = [loss.start for loss in losses if loss.start > 0]
    lost.loglog(ends := [min(starts, default=1), max(starts, default=1)], ends, "k:", linewidth=1)
    lost.set(xlabel="KL with the types from the start", ylabel="KL of changed cells")
    for axis in (times, lost):
        axis.legend(fontsize=8)
    return _saved("types", figure)


def _panels(count: int) -> tuple[Any, Any]:
    """A figure and so many panels."""
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(1.6 + 3.0 * count, 4.0), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for axis in axes:
        axis.grid(alpha=0.3)
    return figure, axes


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
