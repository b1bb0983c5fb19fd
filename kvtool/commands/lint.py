"""Implement `kvtool lint`: check series.toml, the patches, cpp/ and the lock, alone and against each other."""

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
    """Check series.toml, the patches and cpp/ for mistakes.

    series.toml: every listed patch exists, and patches/ has no other patch; each patch has a reason; from and until
    are in order; a claimed pull request has a URL; named tests exist. With groups, each patch and each file of cpp/
    belongs to one group. With goal_lines, each group changes fewer lines of upstream's files. Each patch: it parses,
    its hunk counts are correct, it has one line of context, no white space errors, no CR LF, and an imperative
    subject. cpp/: no path that an upstream has.

    Nothing is applied and nothing is written. Every finding has a file:line, the problem and the remedy.

        kvtool lint
        kvtool lint --project ~/fork

    Exit codes: 6 there are findings.
    """
    env = env_of(ctx)
    project = env.project
    findings = lint_project(project, known_tests(project.cpp))
    broken = any(finding.rule in ("toml", "entry", "twice") for finding in findings)
    return LintResult(0 if broken else len(load_patches(project)), findings)
