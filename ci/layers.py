"""Write the numbers of lines into the pages of the layers (patches/core.md and the others), or check the numbers.

    python ci/layers.py            fails if a page differs from series.toml, the patches and cpp/
    python ci/layers.py --write    corrects the pages

The numbers are between two comments of a page. The number of changed lines in upstream's files is exact. The number of
new lines changes with every edit of cpp/. So a page has this number rounded to hundreds, and the check accepts a page
whose number is wrong by at most a tenth, or by at most 50 lines.
"""

import re
import sys
from pathlib import Path

from kvtool.markdown import table
from kvtool.project import Project, find_project
from kvtool.series.groups import Group
from kvtool.series.patchfile import diff_size, parse_diff, parse_mail
from kvtool.series.series import files_of_groups, load_groups, load_patches
from kvtool.upstream.lock import load_lock

BEGIN, END = "<!-- numbers: ci/layers.py -->\n", "<!-- end of numbers -->\n"
NEW = re.compile(r"About (\d+) new lines in the library, the headers and the programs, and (\d+) in tests and tools\.")


def new_lines(project: Project, group: Group) -> tuple[int, int]:
    """Return two numbers of lines: in the files of cpp/ that users need, and in its tests and tools for tests."""
    product = checks = 0
    for file in files_of_groups(project, [group.id]):
        lines = len(file.source.read_bytes().splitlines())
        if file.path.startswith(("tests/", "tools/kv-check/", "tools/kv-bench/")):
            checks += lines
        else:
            product += lines
    return product, checks


def rounded(now: tuple[int, int], known: tuple[int, int] | None) -> tuple[int, ...]:
    """Round the numbers of new lines (`now`) to hundreds. If the page's numbers (`known`) are close, return `known`."""
    close = known and all(abs(is_ - was) <= max(was // 10, 50) for is_, was in zip(now, known, strict=True))
    return known if close and known else tuple(round(lines, -2) for lines in now)


def numbers(project: Project, group: Group, page: str) -> str:
    """Return the generated part of a page."""
    lock, rows, files, here = load_lock(project.lock), [], set[str](), 0
    total_added = total_removed = 0
    for patch in (patch for patch in load_patches(project) if patch.group == group.id):
        mail = parse_mail((project.patches / patch.file).read_bytes(), patch.file)
        _, added, removed = diff_size(mail.diff)
        limits = ", ".join(f"{key} {tag}" for key, tag in (("from", patch.since), ("until", patch.until)) if tag)
        rows.append((f"`{patch.id}`", str(added), str(removed), limits, patch.why))
        if patch.wanted(lock, lock.upstream()):
            here, total_added, total_removed = here + 1, total_added + added, total_removed + removed
            files |= {file.path for file in parse_diff(mail.diff)}
    found = NEW.search(page)
    known = (int(found[1]), int(found[2])) if found else None
    product, checks = rounded(new_lines(project, group), known)
    needs = " and ".join(f"[{name}]({name}.md)" for name in group.depends) or "nothing"
    return (
        f"It depends on {needs}. On {lock.current}, {here} patches change {total_added + total_removed} lines"
        f" (+{total_added} -{total_removed}) in {len(files)} of upstream's files.\n"
        f"About {product} new lines in the library, the headers and the programs, and {checks} in tests and tools.\n\n"
        + table(("patch", ">+", ">-", "upstreams", "reason"), rows)
    )


def corrected(project: Project, group: Group) -> tuple[Path, str, str]:
    """Return the path of a layer's page, its text, and its text with the correct numbers."""
    path = project.patches / f"{group.id}.md"
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{path} has no {BEGIN.strip()} with {END.strip()} after it")
    return path, page, before + BEGIN + numbers(project, group, page) + END + after


def main() -> int:
    project, wrong = find_project(Path(__file__).resolve().parents[1]), 0
    for group in load_groups(project):
        path, page, right = corrected(project, group)
        if page != right and "--write" in sys.argv:
            path.write_text(right, encoding="utf-8")
        elif page != right:
            wrong += 1
            print(f"{path}: the numbers are wrong; python ci/layers.py --write corrects them", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
