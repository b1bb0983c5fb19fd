"""Draw a view as lines of styled text, for a given width and height. console.py prints them."""

from kvtool.console import Line
from kvtool.top.reading import Budget, Conversations, Memory, Phase, Reading, Slot, State
from kvtool.top.view import Speed, View, size, times, types

USED, COMMITTED, RESERVED = ("█", "green"), ("▓", "yellow"), ("░", "bright_black")
_STYLES = {Phase.IDLE: "bright_black", Phase.WAITING: "red", Phase.PROMPT: "yellow", Phase.GENERATING: "green"}
_COLUMNS = "slot  state          cells  shared       of  reused  prompt generated     t/s"
_INDENT = " " * 8
_EVENTS = 3  # lines that are left for events, if there are so many events


def draw(view: View, width: int, height: int = 0) -> list[Line]:
    """Return the lines of the display.

    There are at most `height` lines (0: any number) of at most `width` columns. Only lines with names that the server
    reports may be longer.
    """
    reading = view.reading
    url = (view.url, "bold")
    waiting = [(f"waiting for it: {_safe(view.trouble.why or view.trouble.what)}", "bold red")] if view.trouble else []
    if reading is None:
        return [[url], waiting]
    lines: list[Line] = [
        [url, (f"  {_safe(reading.model)}", ""), (f"  {_safe(reading.build)}", "bright_black")],
        waiting or _state(reading, view.speeds),
    ]
    for memory in reading.memory:
        lines += [[], *_memory(memory, width)]
    if reading.budget:
        lines += [[], *_budget(reading.budget)]
    if reading.conversations:
        lines += [[], *_conversations(reading.conversations)]
    kept = 1 + min(len(view.events), _EVENTS) if view.events else 0
    room = max(3, height - len(lines) - 1 - kept) if height else 0
    lines += [[], *_slots(reading, view.speeds or {}, width, room)]
    if view.events:
        lines += [[], *([(f"{at}  ", "bright_black"), (_safe(text), "")] for at, text in view.events)]
    return lines[:height] if height else lines


def _safe(text: str) -> str:
    """Replace unprintable characters, because in a text of the server they could move the cursor."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _state(reading: Reading, speeds: dict[int, Speed] | None) -> Line:
    if reading.state == State.ASLEEP:
        return [("asleep", "yellow"), (": its memory is freed; a request wakes it, but kvtool top does not", "")]
    if not speeds:
        return [("awake", "green")]
    prompt = sum(speed.prompt for speed in speeds.values())
    generated = sum(speed.generated for speed in speeds.values())
    return [("awake", "green"), (f"   prompt {prompt:.1f} t/s   generated {generated:.1f} t/s", "")]


def _memory(memory: Memory, width: int) -> list[Line]:
    sizes = (
        (USED, "used", memory.used_bytes, memory.cells_used),
        (COMMITTED, "committed", memory.committed_bytes, memory.cells),
        (RESERVED, "reserved", memory.reserved_bytes, memory.cells_max),
    )
    share = 100 * memory.committed_bytes / memory.reserved_bytes if memory.reserved_bytes else 0.0
    did = f"grew {times(memory.grow_total)}, shrank {times(memory.shrink_total)}"
    if memory.copied_bytes_total:
        did += f", copied {size(memory.copied_bytes_total)}"
    below = [f"cells: {', '.join(f'{cells} {name}' for _, name, _, cells in sizes)}", did]
    if memory.type_k:
        changed = f", changed {times(memory.retype_total)}" if memory.retype_total else ""
        below.append(f"types: {types(memory)}{changed}")
    if memory.more:
        below.append(", ".join(_more(name, value) for name, value in memory.more.items()))
    return [
        [(f"{memory.context:<8}"[:8], "bold"), *_bar(memory, width - 16), (f"{share:6.1f} %", "")],
        [(_INDENT, ""), *(part for mark, name, n, _ in sizes for part in (mark, (f" {size(n)} {name}   ", "")))],
        *([(_INDENT + _safe(text), "")] for text in below),
    ]


def _budget(budget: Budget) -> list[Line]:
    taken = size(budget.committed_bytes) + (f" of {size(budget.bytes)}" if budget.bytes else "") + " taken"
    did = f": down {times(budget.down_total)}, up {times(budget.up_total)}"
    types: list[Line] = [[(_INDENT + _safe(", ".join(budget.types)) + did, "")]] if budget.types else []
    return [[("budget  ", "bold"), (taken, "")], *types]


def _conversations(stored: Conversations) -> list[Line]:
    taken = stored.entry_bytes + stored.checkpoint_bytes + stored.paused_bytes
    of = f" of {size(stored.limit_bytes)}" if stored.limit_bytes else ""
    parts = [f"{size(stored.checkpoint_bytes)} checkpoints", f"{size(stored.paused_bytes)} paused"]
    counts = f"{stored.hits_total} hits, {stored.misses_total} misses, {stored.saved_tokens_total} tokens saved"
    if stored.disk_entries:
        parts.append(f"{size(stored.disk_bytes)} in {stored.disk_entries} files on disk")
        counts += f"; {stored.disk_hits_total} hits on disk"
    return [
        [("chats   ", "bold"), (f"{size(taken)}{of} in RAM, {stored.entries} entries", "")],
        [(_INDENT + ", ".join(parts), "")],
        [(_INDENT + counts, "")],
    ]


def _more(name: str, value: str | int | float) -> str:
    """Return the text for a number of the server whose meaning this version of kvtool does not know.

    name: the server's name for the number
    """
    if name.endswith("_bytes") and not isinstance(value, str):
        return f"{name.removesuffix('_bytes')} {size(value)}"
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return f"{name.replace('_', ' ')} {text}"


def _bar(memory: Memory, width: int) -> Line:
    """Return the bar of used, allocated and reserved memory. Each part that is not 0 has at least one column."""
    full = memory.reserved_bytes
    used = _part(memory.used_bytes, full, width)
    committed = max(_part(memory.committed_bytes, full, width), used + (memory.committed_bytes > memory.used_bytes))
    committed = min(committed, width - (full > memory.committed_bytes))
    used = min(used, committed)
    marks = ((USED, used), (COMMITTED, committed - used), (RESERVED, width - committed if full else 0))
    return [*((mark * count, style) for (mark, style), count in marks), (" " * (0 if full else width), "")]


def _part(count: int, full: int, width: int) -> int:
    return max(1, min(width, round(width * count / full))) if count and full else 0


def _slots(reading: Reading, speeds: dict[int, Speed], width: int, height: int) -> list[Line]:
    """Return a line for each slot. If not all fit, busy slots come first.

    height: the number of lines, 0 for any number
    """
    if reading.slots is None:
        return [[("this server does not report its slots (it runs with --no-slots)", "yellow")]]
    shown = list(reading.slots)
    if height and len(shown) + 1 > height:
        shown = sorted(shown, key=lambda slot: slot.phase == Phase.IDLE)[: height - 2]
    left = len(reading.slots) - len(shown)
    more: list[Line] = [[(f"      and {left} more", "bright_black")]] if left else []
    return [[(_COLUMNS, "bold")], *(_slot(slot, speeds.get(slot.id), width) for slot in shown), *more] if shown else []


def _slot(slot: Slot, speed: Speed | None, width: int) -> Line:
    cells: list[tuple[str, str]] = [
        (f"{slot.id:>4}  ", ""),
        (f"{slot.phase:<10}", _STYLES[slot.phase]),
        (f"{slot.cells:>10}{'' if slot.shared is None else slot.shared:>8}{slot.n_ctx:>9}", ""),
    ]
    if slot.phase != Phase.IDLE:
        now = speed and (speed.generated if slot.phase == Phase.GENERATING else speed.prompt)
        rate = "" if now is None else f"{now:.1f}"
        cells.append((f"{slot.reused:>8}{slot.prompt:>8}{slot.generated:>10}{rate:>8}".rstrip(), ""))
    spare = width - len(_COLUMNS) - 2
    if spare < 20:
        return cells
    filled = _part(slot.cells, slot.n_ctx, spare)
    gap = width - spare - sum(len(text) for text, _ in cells)
    return [*cells, (" " * gap, ""), (USED[0] * filled, USED[1]), (RESERVED[0] * (spare - filled), RESERVED[1])]
