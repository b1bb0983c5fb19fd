"""`kvtool lint`: are series.toml, the patches, cpp/ and the lock right, each alone and against each other?"""

from dataclasses import dataclass

from kvtool.console import Console
from kvtool.errors import KvtoolError, LintError
from kvtool.lint import LintFinding
from kvtool.lint.project import lint_project
from kvtool.options import Context, env_of
from kvtool.result import Result
from kvtool.series.series import load_patches
from kvtool.verify.named import known_tests


@dataclass(frozen=True)
class LintResult(Result, command="lint"):
    """patches: how many were looked at; findings: in the order of files and lines."""

    patches: int
    findings: tuple[LintFinding, ...]

    @property
    def failure(self) -> KvtoolError | None:
        if not self.findings:
            return None
        count = "1 thing" if len(self.findings) == 1 else f"{len(self.findings)} things"
        return LintError(f"{count} to put right", why=str(self.findings[0]), next_step=self.findings[0].next)

    def render(self, console: Console) -> None:
        for finding in self.findings:
            console.line(f"{finding} [{finding.rule}]", "red")
            console.line(f"  next: {finding.next}")
        if not self.findings:
            console.line(f"{self.patches} patches, series.toml, upstream.lock and cpp/ agree")


def command(ctx: Context) -> LintResult:
    """Check the series: what a reviewer would say, before the reviewer says it.

    series.toml against the files: every patch listed and there, nothing else in patches/, a reason for each, from and
    until in order, a pull request where one is claimed, tests that exist. Each patch: it parses, its hunk counts are
    true, one line of context, no white space errors, no CR LF, a subject that is a command. If series.toml has groups:
    each patch and each file of cpp/ belongs to one of them, and fewer changed lines in upstream's files than goal_lines
    for each, if series.toml has that. cpp/: no path that an upstream has.

    Nothing is applied and nothing written. Every finding is told, with file:line, what it is and what to do.

        kvtool lint
        kvtool lint --project ~/fork

    Exit codes: 6 there is something to put right.
    """
    env = env_of(ctx)
    project = env.project
    findings = lint_project(project, known_tests(project.cpp))
    broken = any(finding.rule in ("toml", "entry", "twice") for finding in findings)
    return LintResult(0 if broken else len(load_patches(project)), findings)
