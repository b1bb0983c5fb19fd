"""Test that kvtool export turns each commit of the patched tree into the right patch or file, byte for byte."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Tiny, git
from tests.repo.edits import edit, files


def round_trip(project: Tiny, kvtool, tmp_path: Path) -> None:
    """Assert that the exported series gives the same tree in another folder.

    Also assert that a second export changes nothing.
    """
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    assert kvtool("apply", "--tree", tmp_path / "again").code == 0
    ids = [git(tree, "rev-parse", "HEAD", "HEAD^{tree}") for tree in (project.tree, tmp_path / "again")]
    assert ids[0] == ids[1]


def test_export_without_changes_writes_nothing(applied: Tiny, kvtool) -> None:
    before = applied.snapshot()
    ran = kvtool("export", "--json")
    assert (ran.code, ran.json["files"]) == (0, [])
    assert applied.snapshot() == before
    assert kvtool("export", "--check").code == 0


def test_export_needs_no_fetch(applied: Tiny, kvtool, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("KVTOOL_UPSTREAM", str(tmp_path / "nowhere"))
    edit(applied, "src/b.h", "bool dynamic;", "bool dynamic; // off", "fixup! flag: a patch")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/flag.patch": "change"})


def test_other_patch_format_is_kept(project: Tiny, kvtool) -> None:
    project.add_patch("wide", ("src/a.cpp", "x + 4;", "x + 4 + 4;"), u=3)
    kvtool("apply")
    before = project.snapshot()
    assert files(kvtool("export", "--json")) == {}
    assert project.snapshot() == before


def test_fixup_is_squashed(applied: Tiny, kvtool, tmp_path) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dynamic; // off", "fixup! flag: a patch")
    other = (applied.root / "patches/use.patch").read_bytes()
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/flag.patch": "change"})
    text = (applied.root / "patches/flag.patch").read_text()
    assert text.startswith(f"From {'0' * 40} ") and text.endswith("+    bool dynamic; // off\n     bool three;\n")
    assert re.search(r"^index [0-9a-f]{40}\.\.[0-9a-f]{40} 100644$", text, re.MULTILINE)
    assert (applied.root / "patches/use.patch").read_bytes() == other
    assert git(applied.tree, "log", "--format=%s").splitlines()[:2] == ["use: a patch", "flag: a patch"]
    round_trip(applied, kvtool, tmp_path)


def test_fixup_by_id_nested_and_amend(applied: Tiny, kvtool, tmp_path) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    edit(applied, "src/b.h", "bool dyn;", "bool kv_dyn;", "fixup! fixup! flag: a patch")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "amend! use: a patch\n\nuse: better words\n\nA body.")
    ran = kvtool("export", "--json")
    assert files(ran) == {"patches/flag.patch": "change", "patches/use.patch": "change"}
    assert b"Subject: use: better words" in (applied.root / "patches/use.patch").read_bytes()
    round_trip(applied, kvtool, tmp_path)


def test_multi_line_subject_is_kept(applied: Tiny, kvtool, tmp_path: Path) -> None:
    """Use a subject of several lines, which git joins to one line, even in a fixup!.

    The message must keep its lines.
    """
    edit(applied, "src/b.h", "bool three;", "bool four;", "feat: four\n- did a\n  - did b\n\nbody")
    for five in ("five", "six"):
        file = applied.tree / "src/b.h"
        file.write_text(file.read_text().replace("bool four;", f"bool {five};\n    bool four;"))
        git(applied.tree, "commit", "-qa", "--fixup=HEAD")
        assert kvtool("export").code == 0
        round_trip(applied, kvtool, tmp_path / five)
        assert git(applied.tree, "log", "-1", "--format=%B") == "feat: four\n- did a\n  - did b\n\nbody"
        git(applied.tree, "commit", "-q", "--amend", "--no-edit", f"--author={five} <{five}@x>")
    assert files(kvtool("export", "--json")) == {"patches/feat-four-did-a-did-b.patch": "change"}


@pytest.mark.parametrize("author", ["Foo <>", "a[bot] <1+a[bot]@x.y>", f"{'Ж' * 40} <z@x>", 'A "B, C" D <a@b>'])
def test_author_is_kept(applied: Tiny, kvtool, tmp_path: Path, author: str) -> None:
    """Use an author without an address (user.email is empty), and an address that mail programs refuse."""
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    git(applied.tree, "commit", "-q", "--amend", "--no-edit", f"--author={author}")
    assert kvtool("export").code == 0
    assert git(applied.tree, "log", "-1", "--format=%an <%ae>") == author
    round_trip(applied, kvtool, tmp_path)


@pytest.mark.parametrize("date", ["@0 +0000", "@43200 -1200"])
def test_date_of_1970_is_kept(applied: Tiny, kvtool, tmp_path: Path, date: str) -> None:
    """Use dates with so few digits that git would read them as a year."""
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    git(applied.tree, "commit", "-q", "--amend", "--no-edit", f"--date={date}")
    assert kvtool("export").code == 0
    assert f"@{git(applied.tree, 'log', '-1', '--format=%ad', '--date=raw')}" == date
    round_trip(applied, kvtool, tmp_path)


def test_text_with_late_zeros(applied: Tiny, kvtool, tmp_path: Path) -> None:
    """Use zeros that come after the first 8000 bytes. git searches only these for zeros, to detect a binary file."""
    (applied.tree / "src/table.txt").write_bytes(b"0123456789abcde\n" * 600 + b"\0\0\0\0\n")
    git(applied.tree, "add", "-A")
    git(applied.tree, "commit", "-qm", "table")
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    assert kvtool("export").code == 0
    assert (applied.root / "cpp/src/table.txt").stat().st_size == 9605
    round_trip(applied, kvtool, tmp_path)


@pytest.mark.skipif(sys.platform != "linux", reason="a file name is text there")
def test_non_utf8_file_name(applied: Tiny, kvtool, tmp_path: Path) -> None:
    (applied.tree / os.fsdecode(b"caf\xe9.txt")).write_text("au lait\n")
    git(applied.tree, "add", "-A")
    git(applied.tree, "commit", "-qm", "menu")
    assert kvtool("export", "--json").json["files"] == [{"path": os.fsdecode(b"cpp/caf\xe9.txt"), "action": "add"}]
    round_trip(applied, kvtool, tmp_path)


def test_latin1_message(applied: Tiny, kvtool, tmp_path: Path) -> None:
    """Use the bytes that an old terminal sends. git marks the message as Latin-1 when it makes the commit."""
    edit(applied, "src/b.h", "bool three;", "bool four;", "größer")
    raw = git(applied.tree, "cat-file", "commit", "HEAD", strip=False).encode().replace("ö".encode(), b"\xf6")
    (tmp_path / "raw").write_bytes(raw.replace("ß".encode(), b"\xdf"))
    made = git(applied.tree, "hash-object", "-t", "commit", "-w", str(tmp_path / "raw"))
    git(applied.tree, "update-ref", "HEAD", made)
    assert kvtool("export").code == 0
    assert git(applied.tree, "log", "-1", "--format=%s") == "größer"
    assert 'why = "größer"' in (applied.root / "patches/series.toml").read_text()
    round_trip(applied, kvtool, tmp_path)


def test_applied_commits_survive_gc(applied: Tiny, kvtool) -> None:
    """Let git remove the commits that are in no branch and no reflog, as it does after some weeks."""
    git(applied.tree, "commit", "-q", "--amend", "-m", "use: a patch\n\nA word more.")
    git(applied.tree, "reflog", "expire", "--expire=now", "--expire-unreachable=now", "--all")
    git(applied.tree, "gc", "-q", "--prune=now")
    assert kvtool("status", "--json").json["state"] == "commits"
    assert files(kvtool("export", "--json")) == {"patches/use.patch": "change"}


def test_subject_equal_to_id_is_new_patch(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool three;", "bool four;", "use")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/use-2.patch": "add", "patches/series.toml": "change"})


def test_new_files_move_to_cpp(applied: Tiny, kvtool, tmp_path) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    (applied.tree / "tools/check/run.sh").write_text("#!/bin/sh\nexit 1\n")
    (applied.tree / "tools/check/again.sh").write_text("#!/bin/sh\n")
    (applied.tree / "tools/check/again.sh").chmod(0o755)
    (applied.tree / "src/new.cpp").unlink()
    git(applied.tree, "add", "-A")
    git(applied.tree, "commit", "-qm", "files of all kinds")
    ran = kvtool("export", "--json")
    assert files(ran) == {
        "cpp/src/more.cpp": "add",
        "cpp/src/new.cpp": "remove",
        "cpp/tools/check/again.sh": "add",
        "cpp/tools/check/run.sh": "change",
    }
    assert os.access(applied.root / "cpp/tools/check/again.sh", os.X_OK)
    assert (applied.root / "cpp/README.md").read_text() == "about\n"
    round_trip(applied, kvtool, tmp_path)


def test_commit_with_patch_and_file(applied: Tiny, kvtool, tmp_path) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    git(applied.tree, "add", "-A")
    edit(applied, "src/a.cpp", "x + 6;", "x + 6 + more;", "core: Use MORE of it!")
    ran = kvtool("export", "--json")
    assert files(ran) == {
        "cpp/src/more.cpp": "add",
        "patches/core-use-more-of-it.patch": "add",
        "patches/series.toml": "change",
    }
    text = (applied.root / "patches/series.toml").read_text()
    assert text.startswith("# the series\n") and text.index('id = "use"') < text.index('id = "core-use-more-of-it"')
    assert 'why = "because of flag"' in text
    assert "more.cpp" not in (applied.root / "patches/core-use-more-of-it.patch").read_text()
    round_trip(applied, kvtool, tmp_path)


def test_new_patch_avoids_existing_files(applied: Tiny, kvtool) -> None:
    """Let the files that two new patches would get exist already.

    series.toml does not list one of these files, and lists the other one with another id.
    """
    (applied.root / "patches/Four.patch").write_text("notes of mine\n")
    (applied.root / "patches/use.patch").rename(applied.root / "patches/five.patch")
    with (applied.root / "patches/series.toml").open("a") as series:
        series.write('file = "five.patch"\n')
    was = applied.snapshot()
    edit(applied, "src/b.h", "bool three;", "bool four;", "four")
    edit(applied, "src/a.cpp", "x + 5;", "x + 55;", "five")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (
        0,
        {"patches/four-2.patch": "add", "patches/five-2.patch": "add", "patches/series.toml": "change"},
    )
    assert {**was, **{name: applied.snapshot()[name] for name in was if name.endswith(".patch")}} == was
    assert kvtool("status", "--json").json["unlisted"] == ["Four.patch"]


def test_reordered_commits_reorder_series(applied: Tiny, kvtool, tmp_path) -> None:
    base, flag, use = git(applied.tree, "rev-list", "--reverse", "HEAD").splitlines()[1:]
    git(applied.tree, "reset", "-q", "--hard", base)
    git(applied.tree, "cherry-pick", use, flag)
    ran = kvtool("export", "--json")
    assert ran.code == 0, ran
    text = (applied.root / "patches/series.toml").read_text()
    assert text.index('id = "use"') < text.index('id = "flag"')
    round_trip(applied, kvtool, tmp_path)


def test_reverted_patch_is_removed(applied: Tiny, kvtool, tmp_path) -> None:
    edit(applied, "src/b.h", "    bool dynamic;\n", "", "fixup! flag")
    ran = kvtool("export", "--json")
    assert files(ran) == {"patches/flag.patch": "remove", "patches/series.toml": "change"}
    assert 'id = "flag"' not in (applied.root / "patches/series.toml").read_text()
    round_trip(applied, kvtool, tmp_path)


def test_check_fails_on_drift(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    before, head = applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--check", "--json")
    assert ran.code == 6 and ran.json["error"]["code"] == "drift"
    assert "patches/flag.patch (change)" in ran.json["error"]["why"]
    assert (applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")) == (before, head)


def test_export_touches_no_tree_file(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    for path in applied.tree.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            os.utime(path, ns=(10**18, 10**18))
    kvtool("export")
    kvtool("apply")
    changed = [
        p for p in applied.tree.rglob("*") if p.is_file() and ".git" not in p.parts and p.stat().st_mtime_ns != 10**18
    ]
    assert changed == []


def test_skipped_patch_is_kept(project: Tiny, kvtool, tmp_path) -> None:
    project.add_patch("later", ("src/b.h", "bool one;", "bool one; // new"), extra='from = "v2"\n')
    kvtool("apply")
    edit(project, "src/a.cpp", "x + 6;", "x + 6 + 6;", "six")
    assert files(kvtool("export", "--json")) == {"patches/six.patch": "add", "patches/series.toml": "change"}
    ids = [line for line in (project.root / "patches/series.toml").read_text().splitlines() if line.startswith("id")]
    assert ids == ['id = "flag"', 'id = "use"', 'id = "later"', 'id = "six"']
    round_trip(project, kvtool, tmp_path)


@pytest.mark.parametrize("what", ["mode", "binary"])
def test_change_without_lines_on_other_upstream(project: Tiny, kvtool, what: str) -> None:
    """Change only the mode, or a binary file, in a tree on another tag than the locked one.

    Such a change has no lines, but kvtool export must notice it.
    """
    assert kvtool("apply").code == 0
    (project.tree / "docs/empty").write_bytes(b"\0one")
    git(project.tree, "commit", "-qam", "picture")
    assert kvtool("export").code == 0
    was = (project.root / "patches/picture.patch").read_bytes()
    assert kvtool("apply", "v2").code == 0
    if what == "mode":
        (project.tree / "docs/empty").chmod(0o755)
    else:
        (project.tree / "docs/empty").write_bytes(b"\0two")
    git(project.tree, "commit", "-qam", "fixup! picture")
    assert kvtool("export", "--check").code == 6
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/picture.patch": "change"})
    assert kvtool("status", "--json").json["state"] == "clean"
    (project.root / "patches/picture.patch").write_bytes(was)
    assert kvtool("status", "--json").json["reasons"][-1]["state"] == "changed"


def test_mailbox_command_keeps_crlf(applied: Tiny, kvtool, tmp_path) -> None:
    """Use files with CR LF.

    Without --keep-cr, git am removes the CR. Then patches of such a file fail, and new files differ without an error.
    """
    (applied.tree / "src/new.txt").write_bytes(b"one\r\ntwo\r\n")
    git(applied.tree, "add", "-A")
    git(applied.tree, "commit", "-qm", "new file")
    assert kvtool("export").code == 0
    told = kvtool("export", "--mailbox", tmp_path / "mails").out.splitlines()[-1]
    plain = tmp_path / "plain"
    git(tmp_path, "clone", "-q", "--branch", "v1", str(applied.upstream), str(plain))
    subprocess.run(told.partition(": ")[2], shell=True, cwd=plain, check=True, capture_output=True)
    assert git(plain, "rev-parse", "HEAD^{tree}") == git(applied.tree, "rev-parse", "HEAD^{tree}")


def test_mailbox_is_plain_series(applied: Tiny, kvtool, tmp_path) -> None:
    before = applied.snapshot()
    ran = kvtool("export", "--mailbox", tmp_path / "mails", "--json")
    assert ran.code == 0 and len(ran.json["mailbox"]) == 3
    assert applied.snapshot() == before
    plain = tmp_path / "plain"
    git(tmp_path, "clone", "-q", "--branch", "v1", str(applied.upstream), str(plain))
    git(plain, "am", "-q", *ran.json["mailbox"])
    assert git(plain, "rev-parse", "HEAD^{tree}") == git(applied.tree, "rev-parse", "HEAD^{tree}")
    assert kvtool("export", "--mailbox", tmp_path / "mails").code == 0  # this replaces the earlier mailbox
    (tmp_path / "mails/note.txt").write_text("mine")
    assert kvtool("export", "--mailbox", tmp_path / "mails").code == 2
    assert (tmp_path / "mails/note.txt").exists()
    assert kvtool("export", "--mailbox", tmp_path / "x", "--check").code == 2
    (own := tmp_path / "own").mkdir()
    (own / "0001-my-own-work.patch").write_text("From 1234567890123456789012345678901234567890 Mon Sep 17\n")
    assert kvtool("export", "--mailbox", own).code == 2 and len(list(own.iterdir())) == 1
    below = own / "0001-my-own-work.patch" / "x"
    assert kvtool("export", "--mailbox", below, "--json").json["error"]["code"] == "disk"


def test_comment_moves_with_entry(applied: Tiny, kvtool) -> None:
    series = applied.root / "patches/series.toml"
    text = series.read_text()
    at = text.rindex("[[patch]]")
    series.write_text(text[:at] + "# use: keep until v5\n" + text[at:])
    assert kvtool("apply").code == 0
    base, flag, use = git(applied.tree, "rev-list", "--reverse", "HEAD").splitlines()[1:]
    git(applied.tree, "reset", "-q", "--hard", base)
    git(applied.tree, "cherry-pick", use, flag)
    assert kvtool("export").code == 0
    assert '# use: keep until v5\n[[patch]]\nid = "use"\n' in series.read_text()
