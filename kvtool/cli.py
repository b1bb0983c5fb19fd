"""Run the command line: parse, call a command, render, exit. The only module that exits.

A command is the function `command` of `kvtool/commands/<verb>.py` (import_.py for import), its verb in COMMANDS. Its
docstring is the help: `kvtool --help` lists the first line, indented paragraphs are examples to paste.

`command` is a plain typer function whose first parameter is `ctx: Context` (options.py). _Command adds the options of
every command (--json, --quiet, --verbose, --project, --tree); env_of(ctx) returns their meaning. `command` returns a
Result. It never prints (env.console does) and never exits: errors are raised (KvtoolError) or carried by
Result.failure, and this module turns both into the exit code. env.project is searched for on first use, so a command
that needs no project works anywhere. Import heavy libraries inside command(), not at the top: `kvtool --help` imports
every command module, a command only its own.
"""

import errno
import importlib
import inspect
import io
import keyword
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from kvtool import __version__
from kvtool.console import Console, end_output, escape
from kvtool.errors import BisectAbort, DiskError, KvtoolError, UsageError
from kvtool.options import SHARED, make_env
from kvtool.result import Result

# `kvtool --help` lists the commands in these panels and in this order, which is the usual order of use.
PANELS = {
    "Use the cache": ("doctor", "fetch", "apply", "build", "verify", "top", "bench", "package"),
    "Maintain a series": ("init", "import", "status", "export", "rebase", "diff", "bisect", "canary", "lint"),
}
COMMANDS = tuple(verb for verbs in PANELS.values() for verb in verbs)

EPILOG = """\
Start with kvtool doctor, then fetch, apply, build, verify. The --help of each command has examples.

KVTOOL_CACHE     folder of fetched upstreams and models
KVTOOL_PROJECT   default of --project
KVTOOL_TREE      default of --tree
KVTOOL_UPSTREAM  default of --mirror

Exit codes
0    success                   5    lock mismatch             130  interrupted
1    internal error or disk    6    export drift or lint
2    usage                     7    build or a missing tool
3    conflict                  8    verify or measurement
4    stale or dirty tree       9    network or no server"""


_BEFORE = ("-q", "-v", *(f"--{name}" for name in SHARED))


def _shared_options() -> list[Any]:
    """Return the options of make_env() as parameters of the parser."""
    app = typer.Typer(add_completion=False)
    app.command()(make_env)
    return typer.main.get_command(app).params


def _without_types(params: list[Any]) -> list[Any]:
    """Remove the types of flags and arguments from the help: typer prints <bool> and <str>."""
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda **_: None  # since typer 0.29
    return params


class _Group(typer.core.TyperGroup):
    """The kvtool program."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Command(typer.core.TyperCommand):
    """A command with the options that every command has. It renders its result and returns the exit code."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def __init__(self, *args: Any, params: list[Any], **more: Any) -> None:
        super().__init__(*args, params=[*params, *_shared_options()], **more)
        parameters: list[Any] = self.params
        for parameter in parameters:
            parameter.help = escape(parameter.help or "")  # typer removes [text in brackets] as markup

    def invoke(self, ctx: Any) -> int:
        env = make_env(**{name: ctx.params.pop(name) for name in SHARED})
        ctx.obj = env
        try:
            result: Result = super().invoke(ctx)
        except KvtoolError as err:
            err.next_step = env.console.again(err.next_step)
            raise
        show_result(env.console, result)
        return result.failure.exit_code if result.failure else 0


def show_result(console: Console, result: Result) -> None:
    """Print a result: as JSON, or for people, followed by its failure."""
    failure = result.failure
    if console.json:
        document = result.to_json()
        if failure is not None:
            document["error"]["next"] = console.again(document["error"]["next"])
        console.document(document)
        return
    if result.error not in (None, failure):
        console.line(str(result.error), "red")
    result.render(console)
    if failure is not None:
        failure.next_step = console.again(failure.next_step)
        console.error(failure)


def _flowing(doc: str) -> str:
    """Join the lines of each paragraph, except indented paragraphs, which are examples to paste."""
    paragraphs = doc.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else part.replace("\n", " ") for part in paragraphs)


def module_of(verb: str) -> str:
    """Return the module of a command; a verb that is a word of Python has an underscore there."""
    return f"kvtool.commands.{verb}_" if keyword.iskeyword(verb) else f"kvtool.commands.{verb}"


def build_app(only: str = "") -> typer.Typer:
    """Build the typer app with every command, or with one command to save the imports of the others."""
    app = typer.Typer(
        name="kvtool",
        cls=_Group,
        help=(
            "Build and prove llama.cpp with a KV cache that grows on demand, and move patch sets to new upstreams.\n\n"
            "doctor: check this machine -> fetch: llama.cpp -> apply: create the patched tree -> build -> "
            "verify: prove that the dynamic cache equals the static one, bit for bit."
        ),
        epilog=EPILOG,
        no_args_is_help=True,
        rich_markup_mode="rich",
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
        if version:
            Console().line(f"kvtool {__version__}")
            raise typer.Exit(0)

    for verb in (only,) if only else COMMANDS:
        command = importlib.import_module(module_of(verb)).command
        text = escape(_flowing(inspect.getdoc(command) or ""))
        panel = next(name for name, verbs in PANELS.items() if verb in verbs)
        app.command(verb, cls=_Command, help=text, rich_help_panel=panel)(command)
    return app


_ENDS = (signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM))  # Windows has no SIGHUP


def _interrupted(_number: int, _frame: object) -> NoReturn:
    for each in _ENDS:
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the unwinding
    raise KeyboardInterrupt  # a `kill` unwinds like Ctrl-C: children ended, temporary files removed


def _verb_first(argv: list[str]) -> list[str]:
    """Move shared options after the verb: `kvtool -v --tree DIR status` becomes `kvtool status -v --tree DIR`."""
    at = 0
    while at < len(argv) and argv[at].partition("=")[0] in _BEFORE:
        at += 2 if argv[at] in ("--project", "--tree") else 1
    rest = argv[at:]
    return [rest[0], *argv[:at], *rest[1:]] if rest and not rest[0].startswith("-") else rest


_DENIED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)  # problems of the machine, not bugs


def run(argv: list[str]) -> int:
    """Run one command line and return the exit code. Never raises."""
    argv = _verb_first(argv)
    verb = argv[0] if argv[:1] and argv[0] in COMMANDS else ""
    edge = Console(json="--json" in argv, command=verb)
    judged = any(word.startswith("--at") for word in argv)  # git bisect run would read 1 and 2 as a verdict
    usage, disk, internal = (BisectAbort,) * 3 if judged else (UsageError, DiskError, KvtoolError)
    try:
        try:
            Path.cwd()
        except FileNotFoundError:
            raise usage(
                "the current directory does not exist any more", next_step="cd to an existing directory"
            ) from None
        code = build_app(verb)(args=argv, prog_name="kvtool", standalone_mode=False)
        if code == _Interrupted.exit_code:  # typer turns the exception into an exit code
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except KvtoolError as err:
        edge.error(err)
        return err.exit_code
    except (KeyboardInterrupt, typer.Abort):
        edge.error(_Interrupted("interrupted"))
        return _Interrupted.exit_code
    except Exception as err:
        if hasattr(err, "format_message"):  # the parser's own usage errors, whichever click typer carries
            if message := err.format_message():
                edge.error(usage(message, next_step=f"kvtool {verb} --help".replace("  ", " ")))
            elif hasattr(err, "show"):
                err.show()
            return usage.exit_code
        if isinstance(err, OSError) and err.errno in _DENIED:
            edge.error(disk("a file cannot be read or written", why=str(err)))
            return disk.exit_code
        edge.error(internal(f"internal error: {type(err).__name__}", why=str(err), next_step="please report this"))
        edge.aside(traceback.format_exc())
        return internal.exit_code


class _Interrupted(KvtoolError, code="interrupted", exit_code=130):
    """Ctrl-C or a kill signal."""


def main() -> NoReturn:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed: kvtool status >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a path need not be valid text
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup
            signal.signal(number, _interrupted)
    code = run(sys.argv[1:])
    sys.exit(code if end_output() else code or DiskError.exit_code)
