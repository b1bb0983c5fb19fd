"""Edit the text of series.toml. Comments, blank lines and the user's formatting stay with their entries.

The text is divided into sections: everything above the first table, and then one section for each table. A comment
belongs to the entry below the comment. There is one exception: a comment directly below the last line of an entry,
without a blank line between, belongs to the entry above the comment.
"""

import itertools
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import AoT, Table

_HEADER = re.compile(r"\s*(\[\[?)\s*([\w\"'.\- \t]+?)\s*\]\]?\s*(?:#.*)?$")
_STRING = re.compile(r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'', re.DOTALL)
_COMMENT = re.compile(r"\s*#")


@dataclass(frozen=True)
class Section:
    """Hold one part of the text.

    text: its lines, without blank lines around them
    id: the id of the patch; "" for any other table and for the part above the first table
    """

    text: str
    id: str = ""


def edit_series(text: str, order: list[str], added: dict[str, str], gone: Collection[str], group: str = "") -> str:
    """Return the text with entries for new patches, and without the entries of removed patches.

    Entries are reordered only if that is necessary.

    order: the ids of the patches in the tree
    added: the subject of each new patch, by id
    gone: the ids of the removed patches
    group: the group of the new patches. "" means no group; then a new patch is put after the patch that it follows
        in the tree.
    """
    listed, known = _entries(text)
    known |= {name: _new_entry(name, subject, group) for name, subject in added.items()}
    result = list(order)
    for name in listed:  # a patch that is left out on this upstream stays after the patch that it followed
        if name not in order and name not in gone:
            before = listed[: listed.index(name)]
            at = max((result.index(b) + 1 for b in before if b in result), default=0)
            while group and at < len(result) and result[at] in added:
                at += 1
            result.insert(at, name)
    if result == listed:
        return text
    if result[: len(listed)] == listed and split_sections(text) is not None:
        # the usual case: new entries are added at the end, and no entry moves
        return _joined([text.rstrip("\n"), *(known[name] for name in result[len(listed) :])])
    return _with_entries(text, [known[name] for name in result])


def set_limits(text: str, dropped: Collection[str], limits: Mapping[str, tuple[str, str]]) -> str:
    """Return the text without the dropped patches, and with new limits.

    dropped: the ids of the dropped patches
    limits: by patch id, the key to set and its new tag, such as ("until", tag)
    """
    listed, known = _entries(text)
    if not set(listed) & {*dropped, *limits}:
        return text
    for name in limits:
        if name in known:
            known[name] = _with_key(known[name], *limits[name])
    if split_sections(text) is not None and not set(listed) & set(dropped):
        for name, entry in _entries(text)[1].items():
            text = text.replace(entry, known[name], 1)
        return text
    return _with_entries(text, [known[name] for name in listed if name not in dropped])


def split_sections(text: str) -> list[Section] | None:
    """Divide the text into sections.

    Return None if its patches are not [[patch]] tables, but written as `patch = [...]`.

    A line inside of a string or an array can look like the header of a table, and then the sections would be wrong. So
    the function compares the sections with the result of the TOML parser.
    """
    lines = text.splitlines(keepends=True)
    masked = _STRING.sub(lambda found: "x" + "\n" * found[0].count("\n"), text).splitlines()
    starts = [n for n, line in enumerate(masked) if _starts_table(line)]
    starts = [_with_comments(lines, n) for n in starts]
    cuts = [0, *starts, len(lines)]
    parts = ["".join(lines[a:b]) for a, b in itertools.pairwise(cuts)]
    try:
        wanted = [str(entry["id"]) for entry in _patches(tomlkit.parse(text))]
        sections = [Section(part.strip("\r\n"), _id_of(part)) for part in parts]
    except (TOMLKitError, KeyError, TypeError, ValueError):
        return None
    return sections if [section.id for section in sections if section.id] == wanted else None


def _starts_table(line: str) -> bool:
    """Return True if a line begins a new table. A part of a patch's entry, such as [patch.upstream], does not count."""
    found = _HEADER.match(line)
    if not found:
        return False
    first = re.split(r"\s*\.\s*", found[2].strip())
    is_patch = first[0].strip("\"'") == "patch"
    return not is_patch or (len(first) == 1 and found[1] == "[[")


def _with_comments(lines: list[str], start: int) -> int:
    """Return the line in which the comments of a table begin, given the line of its header."""
    at = start
    while at and _COMMENT.match(lines[at - 1]):
        at -= 1
    if at and lines[at - 1].strip() and _COMMENT.match(lines[at]):
        return start  # the comment is directly below an entry, so it belongs to the entry above
    first = at
    while at and (not lines[at - 1].strip() or _COMMENT.match(lines[at - 1])):
        at -= 1
    if not at:
        return first  # a text above the first table, followed by a blank line, is about the whole file
    after = at  # `at` is now the line after the last key of the entry above
    while after < first and _COMMENT.match(lines[after]):
        after += 1
    return min(after, first)


def _id_of(part: str) -> str:
    document = tomlkit.parse(part)
    if "patch" not in document:
        return ""
    entries = _patches(document)
    if len(entries) != 1 or not isinstance(document["patch"], AoT):
        raise ValueError("not one [[patch]] table")
    return str(entries[0]["id"])


def _patches(document: tomlkit.TOMLDocument) -> list[Any]:
    return list(document.get("patch") or ())


def _entries(text: str) -> tuple[list[str], dict[str, str]]:
    """Return the ids of the patches in their order, and the text of the entry of each id in series.toml."""
    sections = split_sections(text)
    if sections is not None:
        found = {section.id: section.text for section in sections if section.id}
    else:
        found = {str(entry["id"]): _entry_text(entry) for entry in _patches(tomlkit.parse(text))}
    return list(found), found


def _with_entries(text: str, entries: list[str]) -> str:
    """Return the text with its [[patch]] entries replaced by `entries`.

    Other tables stay: tables above the first [[patch]] entry above the entries, all others below the entries. If the
    patches are written as `patch = [...]`, all other tables are above the entries.
    """
    sections = split_sections(text)
    if sections is None:
        document = tomlkit.parse(text)
        document.remove("patch")
        return _joined([tomlkit.dumps(document), *entries])
    first = next((n for n, section in enumerate(sections) if section.id), len(sections))
    head, tail = sections[:first], [section for section in sections[first:] if not section.id]
    return _joined([*(s.text for s in head), *entries, *(s.text for s in tail)])


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip("\n") for part in parts if part.strip()) + "\n"


def _with_key(entry: str, key: str, value: str) -> str:
    """Return the text of an entry with a key set. A new key is put after the last key of the entry's own table."""
    document = tomlkit.parse(entry + "\n")
    table: Any = _patches(document)[0]
    if key in table:
        table[key] = value
        return tomlkit.dumps(document).strip("\n")
    lines = entry.split("\n")
    parts = [n for n, line in enumerate(lines) if _HEADER.match(line)]
    stop = next((n for n in parts[1:] if "." in lines[n].partition("#")[0]), len(lines))
    while stop and (not lines[stop - 1].strip() or _COMMENT.match(lines[stop - 1])):
        stop -= 1
    lines.insert(stop, tomlkit.dumps({key: value}).strip("\n"))
    return "\n".join(lines)


def _new_entry(name: str, subject: str, group: str) -> str:
    of_group = {"group": group} if group else {}
    return _entry_text({"id": name, **of_group, "why": subject, "tests": []})


def _entry_text(entry: Mapping[str, Any]) -> str:
    table = entry if isinstance(entry, Table) else tomlkit.item(dict(entry))
    return tomlkit.dumps({"patch": AoT([table])}).strip("\n")
