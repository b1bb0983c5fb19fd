from dataclasses import dataclass


@dataclass(frozen=True)
class LintFinding:
    """Hold one problem.

    file: relative to the project, with slashes
    line: 1-based, 0 for the file as a whole
    rule: a stable name
    what: one sentence
    next: what to do about the problem
    """

    file: str
    line: int
    rule: str
    what: str
    next: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"
