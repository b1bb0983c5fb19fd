"""Write tables as Markdown, for files that people read on the web."""

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table as Markdown.

    A column whose name starts with ">" is aligned to the right, as in Console.table().
    """
    rule = "|".join("---:" if column.startswith(">") else "---" for column in columns)
    lines = [_row([column.removeprefix(">") for column in columns]), f"|{rule}|", *map(_row, rows)]
    return "\n".join(lines) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", "<br>") for cell in cells) + " |"
