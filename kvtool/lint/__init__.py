from dataclasses import dataclass


@dataclass(frozen=True)
class LintFinding:
    """Hold one mistake that lint found.

    file: the path of the file relative to the project, with slashes
    line: the line, counted from 1; 0 for the file as a whole
    rule: the name of the rule, which never changes
    what: one sentence about the mistake
    next: what the user can do about it
    """

    file: str
    line: int
    rule: str
    what: str
    next: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}" if self.line else f"{self.file}: {self.what}"
