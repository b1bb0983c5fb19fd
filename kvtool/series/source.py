"""Read a source file as lines, and find functions, blocks and #if branches in it. Git is not run.

White space is ignored only in C and similar languages. In all other files (Python, make, YAML, ...) it may have a
meaning, so lines are compared byte by byte. In C, a line counts as the same line if only the amount of white space
differs: between two tokens, before the first token or after the last token. If there was no white space between two
tokens, there must still be none. White space in a string or a character literal must not change.
"""

import functools
import io
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import PurePosixPath

_C_FAMILY = re.compile(r"\.([ch]|cc|hh|[chi]pp|[ch]xx|inl|cuh?|mm?|metal|cl|comp|glsl|hlsl)")
_INDENTED = re.compile(r".*\.(py|cmake|json)|CMakeLists\.txt")  # other files whose blocks are indented
_TOKEN = re.compile(
    rb"(?P<comment>//(?:\\\n|[^\n])*|/\*.*?\*/)"
    rb'|R"(?P<mark>[^()\\\s]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])*\'',
    re.DOTALL,
)
_HIDDEN = bytes.maketrans(b" \t", b"\0\1")  # replaces white space in a literal, where it has a meaning
_BLANK = re.compile(rb"[^\n]")
_BRACKETS = {b"(": b")", b"[": b"]", b"{": b"}"}
_SCOPE = re.compile(rb"[][(){}]|^[ \t]*#[ \t]*(?:if|el|endif)\w*", re.MULTILINE)
_LABEL = re.compile(rb"[ \t]*(?:case\b.*|\w+[ \t]*):(?!:)")
_CONTROL = rb"(?:if|for|while|switch|else|do|try|catch|return|case|default|goto|throw|new|delete|using|typedef)\b"
# Lines that git would use as the heading of a hunk, except labels.
_TOP = re.compile(rb"(?:[A-Za-z_$]|\[\[)(?:.*[^:\s])?\s*$")
_MEMBER = re.compile(rb"(?: {1,4}|\t)(?!" + _CONTROL + rb")[A-Za-z_~][^;]*\([^;]*$")


def split_lines(text: bytes) -> list[bytes]:
    """Divide a file into lines as git does: only a line feed ends a line."""
    return io.BytesIO(text).readlines()


class SourceFile:
    """Hold one source file.

    lines: its lines with their line ends
    keys: one key for each line; lines with equal keys count as the same line, although their white space may differ
    blob: the id of the git object, "" if it is not known
    """

    def __init__(self, text: bytes, path: str = "", blob: str = "") -> None:
        self.lines = split_lines(text)
        self.text, self.path, self.blob = text, path, blob
        self.is_code = bool(_C_FAMILY.fullmatch(PurePosixPath(path).suffix)) and b"\0" not in text

    @cached_property
    def keys(self) -> list[bytes]:
        """Return a key for each line.

        In C, white space outside of strings is removed; in other files, the key is the line.
        """
        return [_key(line) for line in self._hidden] if self.is_code else self.lines

    @cached_property
    def words(self) -> set[bytes]:
        """Return all lines that have a letter or a digit."""
        return words(self.lines)

    @cached_property
    def _hidden(self) -> list[bytes]:
        """Return the lines with the white space in literals replaced by other characters, so that _key() keeps it."""
        return split_lines(_TOKEN.sub(lambda m: m[0] if m["comment"] else m[0].translate(_HIDDEN), self.text))

    @cached_property
    def _code(self) -> list[bytes]:
        """Return the lines with comments replaced by blanks, and literals replaced by x."""
        return split_lines(_TOKEN.sub(lambda m: _BLANK.sub(b" " if m["comment"] else b"x", m[0]), self.text))

    @cached_property
    def _inside(self) -> set[int]:
        """Return the numbers of the lines that begin inside of a comment or a literal."""
        found: set[int] = set()
        number = at = 0
        for token in _TOKEN.finditer(self.text):
            number += self.text.count(b"\n", at, token.start())
            at, first = token.end(), number + 1
            number += token[0].count(b"\n")
            found.update(range(first, number + 1))
        return found

    def branches(self, number: int) -> dict[int, bytes]:
        """Return the #if branches around a line, the outermost first.

        The key is the number of a branch's first line, and the value is its condition. The condition of an #elif is
        written as an #if. An #else has "#else of" and the condition of the branch above it.
        """
        return self._branches[number] if number < len(self._branches) else {}

    @cached_property
    def every_branch(self) -> dict[int, bytes]:
        """Return all #if branches of the file: the number of the first line of each, and its condition."""
        return {n: says for of in self._branches for n, says in of.items()}

    @cached_property
    def block_openings(self) -> list[tuple[bytes, bytes]]:
        """Return, for each line, the pair of this line and the next line that is neither blank nor only a brace.

        Both are keys without indentation.
        """
        found, following = list[tuple[bytes, bytes]](), b""
        for line in map(bytes.strip, reversed(self.keys)):
            found.append((line, following))
            following = line if line not in (b"", b"{") else following
        return found[::-1]

    @cached_property
    def lines_by_header(self) -> dict[tuple[bytes, ...], list[int]]:
        """Return the numbers of the lines with each key, and the numbers of the lines with each pair of keys.

        block_openings has the keys and the pairs. In the result, a single key is a tuple of one element.
        """
        found: dict[tuple[bytes, ...], list[int]] = {}
        for number, opening in enumerate(self.block_openings):
            for head in (opening[:1], opening):
                found.setdefault(head, []).append(number)
        return found

    @cached_property
    def _branches(self) -> list[dict[int, bytes]]:
        found: list[dict[int, bytes]] = []
        still_open: dict[int, bytes] = {}
        for number, line in enumerate(self._code if self.is_code else ()):
            found.append(still_open)
            if directive := re.match(rb"\s*#\s*((if|el|endif).*)", line):
                still_open, above = dict(still_open), b""
                if still_open and directive[2] != b"if":
                    above = still_open.popitem()[1]
                if directive[2] == b"if" or (above and directive[2] == b"el"):
                    says = b" ".join(directive[1].split())
                    still_open[number] = b"#else of " + above if says == b"else" else b"#" + says.removeprefix(b"el")
        return found

    def function_at(self, number: int) -> range | None:
        """Return the lines of the function around a line, None if there is no function.

        Functions are found by indentation. They begin in the first column, or in a class that begins there.
        """
        code = self._code if self.is_code else []
        head = next((n for n in range(min(number, len(code) - 1), -1, -1) if _TOP.match(code[n])), None)
        if head is None or (body := self._body(head)) is None or number not in body:
            return None
        if b"(" in code[head]:
            return body
        member = next((n for n in range(number, head, -1) if _MEMBER.match(code[n])), None)
        inner = self._body(member) if member is not None else None
        return inner if inner is not None and number in inner else None

    def enclosing_headers(self, number: int) -> list[int]:
        """Return the first lines of the blocks around a line, the innermost first.

        Blocks are found by indentation. A function in the first column is left out. If a line is only a brace, the line
        above it is the first line of the block, unless it ends a statement. If there are several labels in a row, all
        of them count.
        """
        name = PurePosixPath(self.path).name
        code = self._code if self.is_code else self.lines if _INDENTED.fullmatch(name) else []
        found: list[int] = []
        column: int | None = None
        brace, under = False, -1
        # an empty line belongs to the block of the next line, unless the next line ends the block
        following = ((n, line.strip()) for n, line in enumerate(code[number:], number))
        below = next(((n, text) for n, text in following if text and not text.startswith(b"#")), None)
        if below and not below[1].startswith(b"}"):
            number = below[0]
        for n in range(min(number, len(code) - 1), -1, -1):
            text = code[n].strip()
            width = len(code[n]) - len(code[n].lstrip(b" \t"))
            if not text or text.startswith(b"#") or (self.is_code and n in self._inside):
                continue
            last, under = under, n
            if brace and column is not None:
                column += not text.endswith((b";", b",", b"{", b"}"))
            brace = False
            if column is not None and width >= column:
                row = width == column and found[-1:] == [last]
                if row and _LABEL.match(code[last]) and _LABEL.fullmatch(text):
                    found.append(n)
                continue
            if not width and self.is_code and _LABEL.fullmatch(text):  # a label such as private: in a class
                continue
            brace = text == b"{"
            heads = not brace and not (
                text.endswith((b",", b";")) and _balanced(text)
            )  # a line that ends in a comma or a semicolon is an argument or a statement, not the first line of a block
            if column is not None and heads and (width or (_TOP.match(code[n]) and b"(" not in text)):
                found.append(n)
            if not width and not brace:
                break
            column = width
        return found

    def is_body(self, number: int) -> bool:
        """Return True if a line is the only statement of an if, for, while or else without braces."""
        above = self._code[number - 1].strip() if self.is_code and 0 < number <= len(self._code) else b""
        return bool(re.match(rb"(?:}\s*)?(?:if|for|while|else|do)\b", above)) and not above.endswith((b"{", b";", b"}"))

    def disabled(self, number: int) -> str:
        """Return why a line is not compiled ("a comment" or "an #if 0"); "" if it is compiled."""
        if not self.is_code or number >= len(self._code):
            return ""
        left_out = {b"#if 0", b"#if false"} & set(self.branches(number).values())
        return "an #if 0" if left_out else "a comment" if number in self._inside else ""

    def _body(self, head: int) -> range | None:
        """Return the lines of the function that starts in the line `head`, or None for a declaration.

        The function ends at the first closing brace that has the same indentation as the line `head`.
        """
        code = self._code
        start = next((n for n in range(head, len(code)) if b"{" in code[n] or b";" in code[n]), None)
        if start is None or b";" in code[start].partition(b"{")[0]:
            return None
        if _balanced(b"".join(code[head : start + 1])):
            return range(head, start + 1)
        first = code[head]
        brace = first[: len(first) - len(first.lstrip(b" \t"))] + b"}"
        end = next((n for n in range(start + 1, len(code)) if code[n].startswith(brace)), None)
        return range(head, end + 1) if end is not None else None


@functools.cache  # a rebase reads a million lines, and 95 % of them are repeated
def _key(line: bytes) -> bytes:
    body = line.rstrip(b"\r\n")
    end = line[len(body) :]
    bare = body.rstrip(b" \t")
    return re.sub(rb"[ \t]+", b" ", bare if not bare.endswith(b"\\") else body) + end


def _balanced(code: bytes) -> bool:
    """Return True if the brackets in `code` are balanced, and the #if and #endif lines, too."""
    still_open: list[bytes] = []
    for found in _SCOPE.finditer(code):
        mark = b"".join(found[0].split())
        if mark in _BRACKETS:
            still_open.append(_BRACKETS[mark])
        elif mark.startswith(b"#if"):
            still_open.append(b"#")
        elif mark.startswith(b"#"):
            if still_open[-1:] != [b"#"]:
                return False
            if mark == b"#endif":
                still_open.pop()
        elif not still_open or still_open.pop() != mark:
            return False
    return not still_open


def words(lines: Sequence[bytes]) -> set[bytes]:
    """Return the lines that have a letter or a digit, without the white space around them."""
    return {line.strip() for line in lines if re.search(rb"[A-Za-z0-9]", line)}


def squeezed(line: bytes) -> bytes:
    """Return a line without any white space. Two lines that differ only in white space become equal."""
    return b"".join(line.split())
