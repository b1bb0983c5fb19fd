"""Hold the answers of a patched llama-server as data."""

import enum
from dataclasses import dataclass, fields
from typing import Any

from kvtool.result import from_plain

DEFAULT_URL = "http://127.0.0.1:8080"


class State(enum.StrEnum):
    """Name the states of a server."""

    AWAKE = "awake"
    ASLEEP = "asleep"


class Phase(enum.StrEnum):
    """Name the activities of a slot. waiting: for cells, before it starts or continues."""

    IDLE = "idle"
    WAITING = "waiting"
    PROMPT = "prompt"
    GENERATING = "generating"


@dataclass(frozen=True)
class Memory:
    """Hold the memory of the caches of one context (target or draft). docs/reference/server.md describes the names.

    more: further numbers of a newer server
    A missing type means that the server has no cells now, or does not report it.
    """

    context: str
    reserved_bytes: int
    committed_bytes: int
    used_bytes: int
    cells_max: int
    cells: int
    cells_used: int
    grow_total: int
    shrink_total: int
    copied_bytes_total: int
    grow_seconds_total: float
    more: dict[str, str | int | float]
    type_k: str = ""
    type_v: str = ""
    retype_total: int = 0
    retype_seconds_total: float = 0.0


@dataclass(frozen=True)
class Budget:
    """Hold the budget of all caches, as `kv_budget` in /props reports it.

    bytes: the limit; 0 without one, when only the memory of the machine limits the caches
    types: the list of --kv-auto-quant, for example f16 and q8_0, from the largest to the smallest
    """

    types: tuple[str, ...]
    bytes: int
    committed_bytes: int
    down_total: int
    up_total: int


@dataclass(frozen=True)
class Conversations:
    """Hold the numbers of conversations outside of the cells, with the server's names.

    limit_bytes: limit of entries, checkpoints and paused requests together, 0 for none
    disk_limit_bytes: limit of the files on disk, 0 for none
    """

    limit_bytes: int
    entry_bytes: int
    checkpoint_bytes: int
    paused_bytes: int
    disk_bytes: int
    disk_limit_bytes: int
    entries: int
    disk_entries: int
    hits_total: int
    misses_total: int
    saved_tokens_total: int
    disk_hits_total: int
    disk_misses_total: int
    disk_saved_tokens_total: int


@dataclass(frozen=True)
class Slot:
    """Describe a slot.

    cells: cells with a token of the slot, at most n_ctx
    task: its last task, -1 before the first
    shared: cells that other slots use, too; None if the server does not report them

    Tokens of the running task: reused (of the prompt, found in the cache), prompt (computed), generated.
    """

    id: int
    phase: Phase
    n_ctx: int
    cells: int
    task: int
    reused: int
    prompt: int
    generated: int
    shared: int | None = None


@dataclass(frozen=True)
class Reading:
    """Hold the numbers of a server at one time.

    slots: empty while the server sleeps, None if it does not report them (--no-slots)
    """

    state: State
    model: str
    build: str
    memory: tuple[Memory, ...]
    slots: tuple[Slot, ...] | None
    budget: Budget | None = None
    conversations: Conversations | None = None


def memory_of(name: str, said: dict[str, Any]) -> Memory:
    """Parse one context of /props. Raises TypeError for unexpected data."""
    known = {field.name for field in fields(Memory)}
    more = {key: value for key, value in said.items() if key not in known and isinstance(value, (str, int, float))}
    return from_plain(Memory, {**said, "context": name, "more": more})


def slot_of(said: dict[str, Any]) -> Slot:
    """Parse one slot of /slots. Raises KeyError, TypeError or ValueError for unexpected data."""
    token = said.get("next_token", {})
    generated = int((token[0] if isinstance(token, list) else token).get("n_decoded", 0))
    working = Phase.GENERATING if generated else Phase.PROMPT
    at_work = Phase.WAITING if said.get("is_waiting") else working
    return Slot(
        int(said["id"]),
        at_work if said["is_processing"] else Phase.IDLE,
        int(said["n_ctx"]),
        int(said.get("n_prompt_tokens", 0)),
        int(said.get("id_task", -1)),
        int(said.get("n_prompt_tokens_cache", 0)),
        int(said.get("n_prompt_tokens_processed", 0)),
        generated,
        int(said["kv_cache"]["target"]["cells_shared"]) if "kv_cache" in said else None,
    )
