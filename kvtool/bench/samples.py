"""What one run of kv-bench says, as data. Sizes in bytes, times in seconds unless a name ends in _us."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Usage:
    """llama_memory_usage: what the memory of a context reserves, has taken and uses."""

    reserved: int
    committed: int
    used: int
    n_grow: int
    n_shrink: int
    n_bytes_copied: int
    t_grow_us: int
    t_grow_max_us: int


@dataclass(frozen=True)
class Point:
    """One moment. name: created, depth, after-clear; rss, peak: resident bytes of the process, -1 unknown."""

    name: str
    depth: int
    rss: int
    peak: int
    usage: Usage


@dataclass(frozen=True)
class Growth:
    """The growths of one call, and right after it the same bytes without a cache: memcpy of what was copied into fresh
    memory, commit of what was added."""

    depth: int
    seconds: float
    memcpy: float
    commit: float


@dataclass(frozen=True)
class Memory:
    """One process: one context from creation to its end."""

    n_layer: int
    create_seconds: float
    rss_before: int
    points: tuple[Point, ...]
    growths: tuple[Growth, ...]


@dataclass(frozen=True)
class Pair:
    """One call of both contexts. kind: create, generate, prompt; base, test: seconds of the static one and the other.

    n_grow, n_added: growths in the other one's call, and the cells that they added.
    """

    round: int
    kind: str
    depth: int
    n_tokens: int
    base: float
    test: float
    n_grow: int
    n_added: int


@dataclass(frozen=True)
class Pairs:
    """One process with both contexts (--rounds)."""

    pairs: tuple[Pair, ...]
