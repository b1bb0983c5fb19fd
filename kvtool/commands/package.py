"""Implement `kvtool package`: make an archive of a build for other machines."""

import platform
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from kvtool.commands import build, export
from kvtool.compile import toolchain
from kvtool.console import Console
from kvtool.gitcmd import Git
from kvtool.options import Context, Cpu, Cuda, Env, Jobs, Metal, Vulkan, choose_backend, env_of
from kvtool.package import archive, contents
from kvtool.project import Project
from kvtool.result import Result
from kvtool.upstream.lock import load_lock


@dataclass(frozen=True)
class Options:
    backend: str = "cpu"
    preset: str = "dist"
    out: Path = Path("dist")
    ui: bool = True
    check: bool = False
    jobs: int = 0


@dataclass(frozen=True)
class Packaged(Result, command="package"):
    """Report an archive.

    archive: the path of the file
    bytes: the size of the file
    sha256: the digest of the file
    files: the paths in the archive
    checked: True if the archive was unpacked in another folder and its programs were tested there
    """

    archive: Path
    bytes: int
    sha256: str
    tag: str
    backend: str
    preset: str
    files: tuple[str, ...]
    checked: bool
    seconds: float

    def render(self, console: Console) -> None:
        ran = ", and it runs elsewhere" if self.checked else ""
        console.line(f"{self.archive} ({self.bytes / 2**20:.1f} MiB, {len(self.files)} files{ran})")
        console.line(f"sha256 {self.sha256}")


def _check(project: Project, console: Console, file: Path) -> None:
    from kvtool.package.check import check  # needs httpx and numpy, so it is imported only for --check
    from kvtool.verify.models import VOCABULARY

    try:
        with console.progress("running it from another folder", None):
            check(file, project.tree / "models" / VOCABULARY)
    except BaseException:  # delete it after Ctrl-C, too
        file.unlink()  # do not leave a broken archive behind
        raise


def make_package(env: Env, options: Options) -> Packaged:
    """Build the missing programs, and write the archive."""
    project, console = env.project, env.console
    project.require_llama_cpp("package")
    started = time.monotonic()
    wanted = build.Options(options.backend, options.preset, jobs=options.jobs, ui=options.ui)
    built = build.build_project(env, wanted)
    with tempfile.TemporaryDirectory(prefix="kvtool-mails-") as place:
        series = export.export_series(env, mailbox=Path(place) / "patches")
        upstream = load_lock(project.lock).upstream(series.tag)
        plan = build.make_plan(project, wanted, toolchain.require(options.backend))
        entries = contents.gather(project, plan, built.targets, upstream, series.mailbox)
    entries.append(archive.sums(entries))
    name = archive.archive_name(series.tag, platform.system(), platform.machine(), built.backend, built.preset)
    file = options.out.absolute() / name
    when = int(Git(project.tree).line("show", "-s", "--format=%at", "HEAD"))
    with console.progress(f"packing {name}", float(sum(len(entry.content) for entry in entries))) as bar:
        digest = archive.write(file, f"llama-{series.tag}", entries, when, bar.update)
    if options.check:
        _check(project, console, file)
    names = tuple(entry.name for entry in entries)
    seconds = time.monotonic() - started
    size = file.stat().st_size
    return Packaged(file, size, digest, series.tag, built.backend, built.preset, names, options.check, seconds)


def command(
    ctx: Context,
    cpu: Cpu = False,
    metal: Metal = False,
    cuda: Cuda = False,
    vulkan: Vulkan = False,
    preset: Annotated[
        str,
        Option(
            "--preset",
            metavar="NAME",
            help="Preset of the build: `dist` runs on other machines, the other presets only on this one.",
        ),
    ] = "dist",
    out: Annotated[Path, Option("--out", metavar="DIR", help="Folder for the archive.")] = Path("dist"),
    ui: Annotated[bool, Option("--ui/--no-ui", help="Include llama-server's web page or not. It needs npm.")] = True,
    check: Annotated[
        bool,
        Option(
            "--check",
            help="Unpack the archive in another folder, compare a static with a dynamic cache there, and start "
            "llama-server.",
        ),
    ] = False,
    jobs: Jobs = 0,
) -> Packaged:
    """Make an archive of the patched llama.cpp that runs on another machine.

    Builds the programs if they are missing. The archive contains the programs, the libraries, their licences, the
    patches as mails for git am (patches/), SHA256SUMS and manifest.json. The manifest has upstream's tag and tree id,
    the flags and the compiler. The archive has the name and the layout of upstream's own release archives. The same
    build gives the same bytes.

        kvtool package --check             # llama-TAG-bin-ubuntu-x64.tar.gz in dist/
        kvtool package --metal             # on a Mac: llama-TAG-bin-macos-arm64.tar.gz
        kvtool package --preset release    # for this machine's processor; quick after kvtool build

    Exit codes: 4 the tree does not match patches/ and cpp/, 7 the build failed or npm is missing, 8 the unpacked
    programs do not run.
    """
    options = Options(
        backend=choose_backend(cpu=cpu, metal=metal, cuda=cuda, vulkan=vulkan),
        preset=preset,
        out=out,
        ui=ui,
        check=check,
        jobs=jobs,
    )
    return make_package(env_of(ctx), options)
