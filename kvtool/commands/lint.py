"""Implement `kvtool lint`: check series.toml, the patches, cpp/ and upstream.lock for mistakes and contradictions."""

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
    """Report the mistakes.

    patches: the number of checked patches
    findings: sorted by file and line
    """

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

    In series.toml, every listed patch must exist, and patches/ must not have other patches. Each patch needs a reason.
    Its `from` must be an earlier tag than its `until`. A patch that was sent to upstream needs the URL of the pull
    request. The tests that a patch names must exist. If series.toml has groups, each patch and each file of cpp/
    must belong to exactly one group. If it has goal_lines, each group must change fewer lines of upstream's files.

    Each patch must be a valid mail with correct line counts in its hunks. It must have one line of context, an
    imperative subject, no white space errors and no CR LF line ends.

    A file of cpp/ must not have the path of a file of upstream.

    Lint applies no patch and writes nothing. Each finding has a file:line, the problem and what to do about it.

        kvtool lint
        kvtool lint --project ~/fork

    Exit codes: 6 there is a mistake.
    """
    env = env_of(ctx)
    project = env.project
    findings = lint_project(project, known_tests(project.cpp))
    broken = any(finding.rule in ("toml", "entry", "twice") for finding in findings)
    return LintResult(0 if broken else len(load_patches(project)), findings)
