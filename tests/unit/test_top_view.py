"""Test the changes between two readings of `kvtool top`, and the picture that it draws."""

from __future__ import annotations

import dataclasses
import html
import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console as RichConsole

from kvtool import cli, console
from kvtool.errors import NetworkError
from kvtool.top.draw import draw
from kvtool.top.reading import Phase, Reading, Slot, State
from kvtool.top.view import Speed, View, changes, size
from tests.unit.tops import MIB, Fake, memory, reading, slot, texts

# --- changes between readings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ({}, {}, []),
        ({}, {"used_bytes": 0, "cells_used": 0}, []),
        (
            {"cells": 256},
            {"cells": 512, "grow_total": 4, "committed_bytes": 17 * MIB, "copied_bytes_total": 3 * MIB},
            ["target grew once: 256 to 512 cells, +1.0 MiB, 3.0 MiB copied"],
        ),
        (
            {"cells": 512},
            {"cells": 256, "shrink_total": 3, "committed_bytes": 15 * MIB},
            ["target shrank 2 times: 512 to 256 cells, -1.0 MiB"],
        ),
        (
            {},
            {"grow_total": 5, "shrink_total": 2, "grow_seconds_total": 0.5},
            ["target grew 2 times and shrank once: 256 to 256 cells, +0 B, 250.0 ms"],
        ),
        (
            {"type_k": "f16", "type_v": "f16"},
            {
                "type_k": "q8_0",
                "type_v": "f16",
                "retype_total": 1,
                "retype_seconds_total": 0.5,
                "committed_bytes": 13 * MIB,
            },
            ["target K f16, V f16 became K q8_0, V f16: 3.0 MiB freed, 500.0 ms"],
        ),
        ({}, {"grow_total": 2, "shrink_total": 9}, ["it was restarted"]),
        ({}, {"grow_total": 9, "shrink_total": 0}, ["it was restarted"]),
    ],
)
def test_changes_between_readings(before: dict[str, Any], now: dict[str, Any], told: list[str]) -> None:
    assert changes(reading(**before), reading(**now)) == told


def test_changes_per_context() -> None:
    before = Reading(State.AWAKE, "", "", (memory("target"),), ())
    now = Reading(State.AWAKE, "", "", (memory("target", grow_total=4), memory("draft", grow_total=9)), ())
    assert [told.split()[0] for told in changes(before, now)] == ["target"], "a new draft has not grown"
    later = Reading(State.AWAKE, "", "", (memory("target", grow_total=5), memory("draft", grow_total=10)), ())
    assert [told.split()[0] for told in changes(now, later)] == ["target", "draft"]


def test_sleep_and_wakeup_are_reported() -> None:
    asleep = reading(state=State.ASLEEP)
    assert changes(reading(), asleep) == ["it fell asleep and freed all memory"]
    assert changes(asleep, reading()) == ["it woke up"]


@pytest.mark.parametrize(
    ("before", "now", "prompt", "generated"),
    [
        (slot(0, Phase.GENERATING, prompt=10, generated=5), slot(0, Phase.GENERATING, prompt=10, generated=25), 0, 10),
        (slot(0, Phase.PROMPT, prompt=10), slot(0, Phase.GENERATING, prompt=30, generated=2), 10, 1),
        (slot(0, Phase.GENERATING, prompt=99, generated=99), slot(0, Phase.PROMPT, prompt=8, task=2), 4, 0),
        (slot(0, prompt=99), slot(0, Phase.GENERATING, prompt=8, generated=4), 4, 2),
        (slot(0, Phase.GENERATING, generated=9), slot(0, Phase.GENERATING, generated=3), 0, 0),
        (slot(0, Phase.GENERATING, generated=9), slot(0, generated=99), 0, 0),
        (slot(1), slot(0, Phase.GENERATING, generated=4), 0, 2),
    ],
)
def test_tokens_per_second(before: Slot, now: Slot, prompt: float, generated: float) -> None:
    view = View("url").with_reading(reading(before), 1.0)
    assert view.speeds is None
    assert view.with_reading(reading(now), 3.0).speeds == {0: Speed(prompt, generated)}


def test_speeds_without_elapsed_time() -> None:
    busy = slot(0, Phase.GENERATING, generated=4)
    assert View("url").with_reading(reading(busy), 1.0).with_reading(reading(busy), 1.0).speeds == {0: Speed()}
    gone = View("url").with_reading(reading(busy), 1.0).with_failure(NetworkError("gone"), 2.0)
    assert gone.speeds is None and gone.events[0][1] == "it does not answer: gone"
    back = gone.with_failure(NetworkError("still gone"), 9.0).with_reading(
        reading(slot(0, Phase.GENERATING, generated=44)), 11.0
    )
    assert back.speeds == {0: Speed(0, 4)}, "averaged over the whole gap"
    assert [text for _, text in back.events] == ["it answers again after 9 s", "it does not answer: gone"]


def test_old_events_are_forgotten() -> None:
    view = View("url")
    for n in range(300):
        view = view.with_reading(reading(grow_total=n), n)
    assert len(view.events) == 100 and "grew once" in view.events[0][1]


def test_size_units() -> None:
    counts = (0, 1023, 1024, 16 * MIB, 1023.9 * MIB, 8192 * MIB, 2**50)
    assert [size(n) for n in counts] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "16.0 MiB",
        "1023.9 MiB",
        "8.0 GiB",
        "1048576.0 GiB",
    ]


# --- the picture --------------------------------------------------------------------------------------------------

LARGE: dict[str, Any] = {"cells_max": 10**7, "cells": 10**7, "cells_used": 10**7, "copied_bytes_total": 1023 * MIB}
LARGE |= dict.fromkeys(("reserved_bytes", "committed_bytes", "used_bytes"), 1024 * MIB - 1)


def full(slots: int, events: int = 0) -> View:
    """Return a view with large numbers."""
    working = [slot(n, Phase.GENERATING, n_ctx=10**7, cells=10**7, reused=10**7, prompt=10**7) for n in range(slots)]
    view = View("http://127.0.0.1:9931").with_reading(reading(*working, **LARGE), 0.0)
    later = [dataclasses.replace(slot, generated=99999) for slot in working]
    grown = tuple(("12:00:00", f"event {n}") for n in range(events))
    return dataclasses.replace(view.with_reading(reading(*later, **LARGE), 1.0), events=grown)


@pytest.mark.parametrize("width", [80, 140])
def test_picture_fits_terminal_width(width: int) -> None:
    lines = texts(draw(full(4, 4), width))
    assert max(map(len, lines)) <= width
    assert len(lines[3]) == width, "the bar uses the whole width"
    assert sum(line.count("█") > 20 for line in lines) == (5 if width == 140 else 1), "slots have bars if they fit"


def test_model_name_is_sanitized() -> None:
    view = View("url").with_reading(dataclasses.replace(reading(), model="a\x1b[2J\nb\ud800" + "長" * 99), 0.0)
    line = draw(view, 80)[0]
    assert texts([line])[0].startswith("url  a?[2J?b?長")
    out = io.StringIO()
    RichConsole(file=out, width=80).print(console.drawn([line]))
    assert out.getvalue().count("\n") == 1 and cell_len(out.getvalue().rstrip("\n")) <= 80 and "…" in out.getvalue()


@pytest.mark.parametrize(
    ("used", "committed", "reserved", "bar"),
    [
        (0, 0, 0, "          "),
        (0, 0, 100, "░░░░░░░░░░"),
        (0, 1, 100, "▓░░░░░░░░░"),
        (1, 1, 100, "█░░░░░░░░░"),
        (1, 2, 100, "█▓░░░░░░░░"),
        (50, 70, 100, "█████▓▓░░░"),
        (99, 99, 100, "█████████░"),
        (98, 99, 100, "█████████░"),
        (99, 100, 100, "██████████"),
        (100, 100, 100, "██████████"),
        (5, 200, 100, "█▓▓▓▓▓▓▓▓▓"),
    ],
)
def test_bar_shows_used_committed_reserved(used: int, committed: int, reserved: int, bar: str) -> None:
    sizes: dict[str, Any] = {"used_bytes": used, "committed_bytes": committed, "reserved_bytes": reserved}
    line = texts(draw(View("url").with_reading(reading(**sizes), 0.0), 26))[3]
    assert line == f"target  {bar}{100 * committed / reserved if reserved else 0:6.1f} %"


def test_speeds_per_slot_and_total() -> None:
    lines = texts(draw(full(2), 80))
    assert lines[1] == "awake   prompt 0.0 t/s   generated 199998.0 t/s"
    assert [line.split()[-1] for line in lines[-2:]] == ["99999.0", "99999.0"]


def test_types_are_shown() -> None:
    types: dict[str, Any] = {"type_k": "q8_0", "type_v": "q4_0"}
    for n, shown in ((0, ""), (1, ", changed once"), (3, ", changed 3 times")):
        lines = texts(draw(View("url").with_reading(reading(**types, retype_total=n), 0.0), 80))
        assert f"        types: K q8_0, V q4_0{shown}" in lines
    assert not any("types" in line for line in texts(draw(View("url").with_reading(reading(), 0.0), 80)))


def test_budget_is_shown(fake: Fake, kvtool: Any) -> None:
    budget = {"types": ["f16", "q8_0"], "bytes": 64 * MIB, "committed_bytes": 12 * MIB, "down_total": 1, "up_total": 0}
    fake.say(kv_budget=budget)
    said = kvtool("top", fake.url).out
    assert "\nbudget  12.0 MiB of 64.0 MiB taken\n        f16, q8_0: down once, up 0 times\n" in said
    assert kvtool("top", fake.url, "--json").json["server"]["budget"] == budget
    fake.say(kv_budget={**budget, "bytes": 0, "types": []})
    assert "\nbudget  12.0 MiB taken\n\nslot" in kvtool("top", fake.url).out
    fake.say(kv_budget={"types": []})
    assert kvtool("top", fake.url).code == 8


def test_conversations_are_shown(fake: Fake, kvtool: Any) -> None:
    stored = {
        **{"limit_bytes": 64 * MIB, "entry_bytes": 8 * MIB, "checkpoint_bytes": 3 * MIB, "paused_bytes": MIB},
        **{"disk_bytes": 0, "disk_limit_bytes": 0, "entries": 4, "disk_entries": 0},
        **{"hits_total": 7, "misses_total": 2, "saved_tokens_total": 900},
        **{"disk_hits_total": 5, "disk_misses_total": 2, "disk_saved_tokens_total": 600},
    }
    fake.say(conversations=stored)
    said = kvtool("top", fake.url).out
    assert "\nchats   12.0 MiB of 64.0 MiB in RAM, 4 entries\n        3.0 MiB checkpoints, 1.0 MiB paused\n" in said
    assert "        7 hits, 2 misses, 900 tokens saved\n" in said
    assert kvtool("top", fake.url, "--json").json["server"]["conversations"] == stored
    fake.say(conversations={**stored, "limit_bytes": 0, "disk_bytes": MIB, "disk_entries": 2})
    said = kvtool("top", fake.url).out
    assert "\nchats   12.0 MiB in RAM" in said and ", 1.0 MiB in 2 files on disk\n" in said
    assert "900 tokens saved; 5 hits on disk\n" in said


@pytest.mark.parametrize("height", [12, 24, 60])
def test_low_terminal_keeps_busy_slots(height: int) -> None:
    idle, busy = [slot(n) for n in range(60)], slot(60, Phase.GENERATING, generated=1)
    view = dataclasses.replace(View("url").with_reading(reading(*idle, busy), 0.0), events=(("12:00:00", "last"),) * 9)
    lines = texts(draw(view, 80, height))
    assert len(lines) == height
    slots = [line for line in lines if " idle " in line or " generating " in line]
    assert "generating" in slots[0] and f"and {61 - len(slots)} more" in "\n".join(lines)
    assert height == 12 or lines[-1].endswith("last")
    assert len(draw(view, 80)) > 70, "without a height, all lines"


def test_ascii_terminal(fake: Fake, kvtool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said_to = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(said_to, encoding="ascii"))
    assert cli.run(["top", fake.url]) == 0
    sys.stdout.flush()
    said = said_to.getvalue().decode()
    assert "target  ##=..." in said and "= 16.0 MiB committed" in said


def test_picture_in_docs_is_current() -> None:
    """If this test fails, run `python ci/top_picture.py`."""
    svg = (Path(__file__).parents[2] / "docs" / "results" / "top.svg").read_text("utf-8")
    shown = " ".join(html.unescape(" ".join(re.findall(r"<text [^>]*>([^<]*)</text>", svg))).split())
    *_, memory, sizes, cells, grown, _, columns, _ = texts(draw(View("url").with_reading(reading(slot(0)), 0.0), 100))
    for line in (sizes, cells, grown, columns):
        words = [word for word in re.split(r"[\d.]+ (?:[MG]iB|B)?|once|times", line) if word.strip(" ▓█░")]
        assert all(" ".join(word.split()).strip("▓█░ ,") in shown for word in words), line
    assert "target" in memory and "http" not in re.sub(r"http://(127|www.w3.org)|https://www.textualize.io", "", svg)


def test_interactive_needs_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not console.Console().interactive
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert console.Console().interactive
    monkeypatch.setenv("TERM", "dumb")
    assert not console.Console().interactive
