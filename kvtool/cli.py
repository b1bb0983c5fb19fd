"""Run the command line: parse the arguments, call the command, print its result and exit.

This is the only module that exits.

A command is the function `command` of kvtool/commands/NAME.py. Only the module of import has another name, import_.py.
The names of the commands are in COMMANDS. The docstring of the function is the help text. `kvtool --help` prints its
first line. Its indented paragraphs are printed as they are: they are examples to paste, or lists.

`command` is a typer function whose first parameter is `ctx: Context` (see options.py). _Command adds the options that
every command has: --json, --quiet, --verbose, --project and --tree. env_of(ctx) returns an Env that was made from them.

`command` returns a Result. It never prints; it uses env.console instead. It never exits: an error is raised as a
KvtoolError, or returned in Result.failure. This module turns both into the exit code.

env.project searches for the project on first use. So a command that needs no project works in any folder. Import heavy
libraries inside of command(): `kvtool --help` imports the modules of all commands, and would be slow otherwise.
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

# Panels of `kvtool --help`. The commands are in the order in which they are usually run.
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
    """Return the parameters of make_env() as parameters for the parser."""
    app = typer.Typer(add_completion=False)
    app.command()(make_env)
    return typer.main.get_command(app).params


def _without_types(params: list[Any]) -> list[Any]:
    """Remove the types of flags and arguments, so that the help does not show <bool> and <str>."""
    for parameter in params:
        if getattr(parameter, "is_flag", False):
            parameter.metavar = ""
        elif parameter.param_type_name == "argument":
            parameter.display_type_rich = lambda **_: None  # since typer 0.29
    return params


class _Group(typer.core.TyperGroup):
    """Be the parser of the kvtool program."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))


class _Command(typer.core.TyperCommand):
    """Parse and run one command: add the shared options, print the result, and return the exit code."""

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
    """Print a result as JSON or for people, and then its error."""
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
    """Join the lines of each paragraph, except of indented paragraphs, which are printed as they are."""
    paragraphs = doc.split("\n\n")
    return "\n\n".join(part if part.startswith("    ") else part.replace("\n", " ") for part in paragraphs)


def module_of(verb: str) -> str:
    """Return the name of a command's module. If the command has the name of a Python keyword, append an underscore."""
    return f"kvtool.commands.{verb}_" if keyword.iskeyword(verb) else f"kvtool.commands.{verb}"


def build_app(only: str = "") -> typer.Typer:
    """Build the parser with every command. With `only`, import and add just that command, to start faster."""
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
        signal.signal(each, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    raise KeyboardInterrupt  # clean up as after Ctrl-C: end child processes and remove temporary files


def _verb_first(argv: list[str]) -> list[str]:
    """Move the shared options after the name of the command.

    For example, `kvtool -v --tree DIR status` becomes `kvtool status -v --tree DIR`.
    """
    at = 0
    while at < len(argv) and argv[at].partition("=")[0] in _BEFORE:
        at += 2 if argv[at] in ("--project", "--tree") else 1
    rest = argv[at:]
    return [rest[0], *argv[:at], *rest[1:]] if rest and not rest[0].startswith("-") else rest


# errors of the machine, such as a full disk, and not of kvtool
_DENIED = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)


def run(argv: list[str]) -> int:
    """Run one command line and return the exit code. Never raises."""
    argv = _verb_first(argv)
    verb = argv[0] if argv[:1] and argv[0] in COMMANDS else ""
    edge = Console(json="--json" in argv, command=verb)
    # with --at, git bisect run would read exit codes 1 and 2 as verdicts, so use 128
    judged = any(word.startswith("--at") for word in argv)
    usage, disk, internal = (BisectAbort,) * 3 if judged else (UsageError, DiskError, KvtoolError)
    try:
        try:
            Path.cwd()
        except FileNotFoundError:
            raise usage(
                "the current directory does not exist any more", next_step="cd to an existing directory"
            ) from None
        code = build_app(verb)(args=argv, prog_name="kvtool", standalone_mode=False)
        if code == _Interrupted.exit_code:  # typer catches KeyboardInterrupt and returns this exit code instead
            raise KeyboardInterrupt
        return code if isinstance(code, int) else 0
    except KvtoolError as err:
        edge.error(err)
        return err.exit_code
    except (KeyboardInterrupt, typer.Abort):
        edge.error(_Interrupted("interrupted", next_step="type the same command again; finished work is kept"))
        return _Interrupted.exit_code
    except Exception as err:
        # usage errors of the parser; typer may contain its own copy of click, so the class is not tested
        if hasattr(err, "format_message"):
            if message := err.format_message():
                edge.error(usage(message, next_step=edge.again(f"kvtool {verb} --help".replace("  ", " "))))
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
    """Ctrl-C or a kill signal ended kvtool."""


def main() -> NoReturn:
    """Run the command line and exit."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the stream was closed, as in: kvtool status >&-
            setattr(sys, name, open(os.devnull, "w"))  # noqa: PTH123, SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # replace characters that cannot be encoded: a path may have any bytes
            stream.reconfigure(errors="backslashreplace")
    for number in _ENDS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # keep an ignored signal ignored, as under nohup
            signal.signal(number, _interrupted)
    code = run(sys.argv[1:])
    sys.exit(code if end_output() else code or DiskError.exit_code)
