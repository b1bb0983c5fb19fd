"""Test how kvtool export finds the patch of a commit, what it reports, and git am with the result."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Tiny, git
from tests.repo.edits import edit, files
from tests.repo.rebases import release


def patches(ran: Any) -> dict[str, str]:
    return {patch["id"]: patch["state"] for patch in ran.json["patches"]}


def clean(project: Tiny, kvtool: Any) -> None:
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0


def test_reworded_commit_is_recognized(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "commit", "-q", "--amend", "-m", "use: a better subject")
    ran = kvtool("export", "--json")
    assert (ran.code, files(ran)) == (0, {"patches/use.patch": "change"})
    assert patches(ran) == {"flag": "unchanged", "use": "changed"}
    assert "Subject: use: a better subject" in (applied.root / "patches/use.patch").read_text()
    assert 'why = "because of use"' in (applied.root / "patches/series.toml").read_text()
    clean(applied, kvtool)


def test_reworded_changed_commit_needs_command(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "commit", "-q", "--amend", "-m", "use: a better subject")
    edit(applied, "src/a.cpp", "+ grown();", "+ grew();", "x")
    git(applied.tree, "reset", "-q", "--soft", "HEAD~1")
    git(applied.tree, "commit", "-q", "--amend", "--no-edit")
    ran = kvtool("export", "--json")
    assert ran.code == 4
    assign, drop = ran.json["error"]["next"].split("\n")
    assert drop.endswith("kvtool export --drop use")
    ran = kvtool(*assign.split("kvtool ")[1].split(), "--json")
    assert (ran.code, patches(ran)) == (0, {"flag": "unchanged", "use": "changed"})
    clean(applied, kvtool)


def test_trailer_names_the_patch(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    edit(applied, "src/a.cpp", "x + 2;", "x + 22;", "use: other\n\nKvtool-Patch: use")
    assert patches(kvtool("export", "--json")) == {"flag": "unchanged", "use": "changed"}
    clean(applied, kvtool)


@pytest.mark.parametrize(
    "subjects", [("use: a patch", "use: rest"), ("use: rest", "use: a patch"), ("use: a patch",) * 2]
)
def test_split_commit_becomes_two_patches(applied: Tiny, kvtool: Any, subjects: tuple[str, str]) -> None:
    git(applied.tree, "reset", "-q", "--soft", "HEAD~1")
    git(applied.tree, "reset", "-q", "CMakeLists.txt")
    git(applied.tree, "commit", "-qm", subjects[0])
    git(applied.tree, "commit", "-qam", subjects[1])
    ran = kvtool("export", "--json")
    assert ran.code == 0, ran
    assert sorted(patches(ran).values()) == ["changed", "new", "unchanged"] and patches(ran)["use"] == "changed"
    clean(applied, kvtool)


def test_squashed_patch_is_reported(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "reset", "-q", "--soft", "HEAD~1")
    git(applied.tree, "commit", "-q", "--amend", "--no-edit")
    ran = kvtool("export", "--json")
    assert (ran.code, patches(ran)) == (0, {"flag": "changed", "use": "dropped"})
    assert ran.json["patches"][1]["note"] == "squashed into flag"
    assert not (applied.root / "patches/use.patch").exists()
    clean(applied, kvtool)


def test_dropped_commit_needs_one_command(applied: Tiny, kvtool: Any) -> None:
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    assert kvtool("export").code == 4
    ran = kvtool("export", "--drop", "use", "--json")
    assert (ran.code, patches(ran)) == (0, {"flag": "unchanged", "use": "dropped"})
    clean(applied, kvtool)
    assert kvtool("export", "--drop", "flag").code == 2


def test_equal_subjects_are_separate_patches(applied: Tiny, kvtool: Any) -> None:
    for old, new in (("x + 5;", "x + 55;"), ("x + 6;", "x + 66;"), ("x + 7;", "x + 77;")):
        edit(applied, "src/a.cpp", old, new, "wip")
    ran = kvtool("export", "--json")
    assert patches(ran) == {"flag": "unchanged", "use": "unchanged", "wip": "new", "wip-2": "new", "wip-3": "new"}
    clean(applied, kvtool)
    assert kvtool("lint").out.count("subject") == 3  # three findings about `why`, which only repeats the subject
    heads = git(applied.tree, "rev-list", "--reverse", "HEAD").split()
    git(applied.tree, "reset", "-q", "--hard", heads[3])
    git(applied.tree, "cherry-pick", heads[6], heads[5], heads[4])
    assert set(patches(kvtool("export", "--json")).values()) == {"unchanged"}
    ids = [row for row in (applied.root / "patches/series.toml").read_text().splitlines() if row.startswith("id")]
    assert ids == [f'id = "{name}"' for name in ("flag", "use", "wip-3", "wip-2", "wip")]
    release(applied, "v3", ("src/b.h", "bool one;", "bool uno;"))
    assert kvtool("rebase", "v3").code == 0
    clean(applied, kvtool)
    assert kvtool("diff", "v1", "v3").code == 0
    edit(applied, "src/a.cpp", "x + 66;", "x + 666;", "fixup! wip")
    assert kvtool("export", "--json").json["error"]["what"] == "several patches have the subject 'wip'"
    git(applied.tree, "commit", "-q", "--amend", "-m", "fixup! wip-2")
    assert files(kvtool("export", "--json")) == {"patches/wip-2.patch": "change"}


def test_fixup_of_equal_subject_is_ambiguous(applied: Tiny, kvtool: Any) -> None:
    edit(applied, "src/a.cpp", "x + 5;", "x + 55;", "again: x")
    edit(applied, "src/a.cpp", "x + 6;", "x + 66;", "again: x")
    assert kvtool("export").code == 0
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "fixup! again: x")
    ran = kvtool("export", "--json")
    assert ran.code == 4
    edit(applied, "src/a.cpp", "x + 66;", "x + 67;", ran.json["error"]["next"].split("'")[1])
    git(applied.tree, "reset", "-q", "--soft", "HEAD~2")
    git(applied.tree, "commit", "-qm", ran.json["error"]["next"].split("'")[1])
    assert kvtool("export").code in (0, 3)


@pytest.mark.parametrize("kind", ["amend", "fixup", "squash"])
def test_fixup_of_nothing_is_refused(applied: Tiny, kvtool: Any, kind: str) -> None:
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", f"{kind}! use: a typo\n\nuse: an even better subject")
    ran = kvtool("export", "--json")
    assert ran.code == 4 and "is a fixup, but its patch was not found" in ran.json["error"]["what"]


def test_export_reports_every_commit_and_loss(applied: Tiny, kvtool: Any) -> None:
    (applied.tree / "src/tool.cpp").write_text("int tool;\n")
    git(applied.tree, "add", "-A")
    git(applied.tree, "commit", "-q", "--author=Bob <bob@x>", "-m", "tool: a new file")
    edit(applied, "src/a.cpp", "x + 5;", "x + 55;", "five: use the tool")
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "squash! flag: a patch\n\nThe reason.")
    git(applied.tree, "commit", "-q", "--amend", "--no-edit", "--author=Eve <eve@x>")
    ran = kvtool("export")
    assert ran.code == 0, ran
    for words in ("new       patch five", "five: use the tool", "changed   patch flag", "squash! flag: a patch"):
        assert words in ran.out
    for words in ("tool: a new file' by Bob <bob@x>", "the message of", "Eve <eve@x>"):
        assert any("note: " in line and words in line for line in ran.out.splitlines()), words
    clean(applied, kvtool)


EXAMPLE = """[SYCL] one: an example

From: nobody
It was reported so:\t


From 0123456789012345678901234567890123456789 Mon Sep 17 00:00:00 2001
--- a/src/b.h
+++ b/src/b.h
@@ -1,1 +1,1 @@
-struct params {
+struct other {
diff --git a/src/b.h b/src/b.h
---
Index: src/b.h
-- >8 --
the end
"""


def test_mails_recreate_the_commits(applied: Tiny, kvtool: Any, tmp_path: Path) -> None:
    messages = [EXAMPLE, "[PATCH] two", "Re: [tag] three\n\nSubject: four\n[PATCH] five\nbody", "a\nb\n\nc"]
    for number, message in enumerate(messages, 4):
        edit(applied, "src/a.cpp", f"x + {number};", f"x + {number}{number};", "x")
        subprocess.run(
            ["git", "-C", applied.tree, "commit", "-q", "--amend", "--cleanup=verbatim", "-F", "-"],
            input=message.encode(),
            check=True,
        )
    ran = kvtool("export", "--json")
    assert ran.code == 0 and sum("a blank is put in front" in loss for loss in ran.json["losses"]) == 2
    clean(applied, kvtool)
    told = kvtool("export", "--mailbox", tmp_path / "with a blank" / "mails").out.splitlines()[-1]
    plain = tmp_path / "plain"
    git(tmp_path, "clone", "-q", "--branch", "v1", str(applied.upstream), str(plain))
    subprocess.run(told.partition(": ")[2], shell=True, cwd=plain, check=True, capture_output=True)
    shown = [git(repo, "log", "-5", "--format=%T %an %ae %ad%n%B") for repo in (plain, applied.tree)]
    assert shown[0] == shown[1] and " --- a/src/b.h\n" in shown[0]


def test_patch_headers_and_notes_are_kept(applied: Tiny, kvtool: Any) -> None:
    file = applied.root / "patches/use.patch"
    text = file.read_text()
    subject = next(line for line in text.splitlines() if line.startswith("Subject:"))
    extra = f"{subject}\nOrigin: vendor,\n https://example.org/1\nBug-Debian: https://bugs.debian.org/1"
    notes = "---\nNotes: do not drop.\n\nEver.\n src/a.cpp | 2 +-\n 1 file changed, 1 insertion(+)\n\n"
    text = text.replace(subject, extra).replace("---\n", "", 1) if "\n---\n" in text else text.replace(subject, extra)
    at = text.index("diff --git")
    file.write_text(text[:at] + notes + text[at:])
    assert kvtool("apply").code == 0
    assert kvtool("export", "--check").code == 0
    git(applied.upstream, "mv", "src/a.cpp", "src/z.cpp")
    release(applied, "v3")
    assert kvtool("rebase", "v3").code == 0
    edit(applied, "src/z.cpp", "+ grown();", "+ grew();", "fixup! use")
    assert kvtool("export").code == 0
    text = file.read_text()
    assert "grew" in text and "src/z.cpp" in text
    for words in (
        "\nOrigin: vendor,\n https://example.org/1\n",
        "\nBug-Debian: https",
        "\n---\nNotes: do not drop.\n\nEver.\n",
    ):
        assert text.count(words) == 1, words
    assert "1 file changed" not in text
    clean(applied, kvtool)
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    ran = kvtool("export", "--drop", "use", "--json")
    assert "headers and notes" in ran.json["losses"][0]
