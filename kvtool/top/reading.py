"""Hold the answers of a patched llama-server as data."""

import enum
from dataclasses import dataclass, fields
from typing import Any

from kvtool.result import from_plain

DEFAULT_URL = "http://127.0.0.1:9931"


class State(enum.StrEnum):
    """Name the states of a server."""

    AWAKE = "awake"
    ASLEEP = "asleep"


class Phase(enum.StrEnum):
    """Name the states of a slot. WAITING means that the slot needs free cells before it can start or continue."""

    IDLE = "idle"
    WAITING = "waiting"
    PROMPT = "prompt"
    GENERATING = "generating"


@dataclass(frozen=True)
class Memory:
    """Hold the memory of the caches of one context, which belongs to the target or to the draft model.

    docs/reference/server.md explains the names. A type is "" if the server has no cells now, or does not report types.

    more: numbers of a newer server that this version of kvtool does not know, by name
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
    """Hold the memory budget of all caches, as `kv_budget` in /props reports it.

    bytes: the limit; 0 if there is none, so that only the machine's memory limits the caches
    types: the types of --kv-auto-quant from the largest to the smallest, for example f16 and q8_0
    """

    types: tuple[str, ...]
    bytes: int
    committed_bytes: int
    down_total: int
    up_total: int


@dataclass(frozen=True)
class Conversations:
    """Hold the numbers of conversations that are stored outside of the cells. The names are the server's.

    limit_bytes: the limit for entries, checkpoints and paused requests together, 0 for none
    disk_limit_bytes: the limit for the files on disk, 0 for none
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

    cells: the number of cells with a token of the slot, at most n_ctx
    task: the id of its last task, -1 before the first task
    reused: the prompt tokens of the running task that were found in the cache
    prompt: the prompt tokens of the running task that were computed
    generated: the generated tokens of the running task
    shared: the number of its cells that other slots use, too; None if the server does not report it
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

    slots: empty while the server sleeps; None if it does not report its slots (--no-slots)
    """

    state: State
    model: str
    build: str
    memory: tuple[Memory, ...]
    slots: tuple[Slot, ...] | None
    budget: Budget | None = None
    conversations: Conversations | None = None


def memory_of(name: str, said: dict[str, Any]) -> Memory:
    """Parse one context of /props. Raise TypeError for unexpected data."""
    known = {field.name for field in fields(Memory)}
    more = {key: value for key, value in said.items() if key not in known and isinstance(value, (str, int, float))}
    return from_plain(Memory, {**said, "context": name, "more": more})


def slot_of(said: dict[str, Any]) -> Slot:
    """Parse one slot of /slots. Raise KeyError, TypeError or ValueError for unexpected data."""
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
