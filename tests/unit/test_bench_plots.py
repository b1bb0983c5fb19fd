"""Test the plots of kvtool.bench.plots: labels without overlaps, and two colour schemes."""

import pytest

from kvtool.bench import plots


@pytest.mark.parametrize(
    ("heights", "expected"),
    [
        ([0, 30, 10], [0, 30, 10]),
        ([5, 5], [0, 10]),
        ([30, 1, 2, 3], [30, -8, 2, 12]),
        ([0, 8, 15], [-2.33, 7.67, 17.67]),  # moving the first two apart also moves the third one
        ([], []),
    ],
)
def test_spread_separates_labels(heights: list[float], expected: list[float]) -> None:
    assert plots.spread(heights, 10) == pytest.approx(expected, abs=0.01)


def test_lines_have_labels_at_last_points() -> None:
    with plots.picture("some") as (files, (axis,)):
        axis.plot([0, 1], [0, 2], color=plots.BLUE, label="upper")
        axis.plot([0, 1], [0, 1.99], color=plots.ORANGE, label="lower")
        axis.plot([0, 1], [1, 1], color=plots.GREY)
    texts = {text.get_text(): text for text in axis.texts}
    assert set(texts) == {"upper", "lower"} and axis.get_legend() is None
    assert texts["upper"].get_color() == plots.BLUE and texts["upper"].xy == (1, 2)
    assert texts["upper"].get_position()[1] - texts["lower"].get_position()[1] > 10
    assert set(files) == {"some.svg"}


def test_svg_has_dark_scheme() -> None:
    with plots.picture("some") as (files, (axis,)):
        axis.plot([0, 1], [0, 1], color=plots.ORANGE)
    svg = files["some.svg"].decode()
    head, _, body = svg.partition("</style>")
    assert "@media (prefers-color-scheme: dark)" in head
    for name in ("BACKGROUND", "INK", "ORANGE"):
        colour = getattr(plots, name)
        assert colour in body and f': {colour}"]' in head, "every colour has a counterpart"
    assert "black" not in body and "#000000" not in body


def test_bars_have_labels_outside() -> None:
    with plots.picture("some") as (_, (axis,)):
        axis.barh(["gain", "loss"], [2.0, -1.0])
        plots.label_bars(axis, ["+2", "-1"])
    assert [(text.get_text(), text.xy[0], text.get_ha()) for text in axis.texts] == [
        ("+2", 2.0, "left"),
        ("-1", -1.0, "right"),
    ]
