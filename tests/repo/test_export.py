"""kvtool export: commits of the patched tree flow back, each to where it belongs, byte for byte, all or nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvtool.tree import flowback
from tests.conftest import Tiny, git, write_files


@pytest.fixture
def applied(project: Tiny, kvtool) -> Tiny:
    assert kvtool("apply").code == 0
    return project


def edit(project: Tiny, path: str, old: str, new: str, message: str) -> None:
    """Replace in the patched tree, and commit."""
    file = project.tree / path
    text = file.read_text()
    assert text.count(old) == 1
    file.write_text(text.replace(old, new))
    git(project.tree, "commit", "-qam", message)


def files(ran) -> dict[str, str]:
    return {file["path"]: file["action"] for file in ran.json["files"]}


def round_trip(project: Tiny, kvtool, tmp_path: Path) -> None:
    """What was exported gives the same tree elsewhere, and there is nothing more to export."""
    assert kvtool("status", "--json").json["state"] == "clean"
    assert kvtool("export", "--check").code == 0
    assert kvtool("apply", "--tree", tmp_path / "again").code == 0
    ids = [git(tree, "rev-parse", "HEAD", "HEAD^{tree}") for tree in (project.tree, tmp_path / "again")]
    assert ids[0] == ids[1]


def test_nothing_changed_nothing_written(applied: Tiny, kvtool) -> None:
    before = applied.snapshot()
    ran = kvtool("export", "--json")
    assert (ran.code, ran.json["files"]) == (0, [])
    assert applied.snapshot() == before
    assert kvtool("export", "--check").code == 0


def test_patch_written_otherwise_keeps_its_bytes(project: Tiny, kvtool) -> None:
    project.add_patch("wide", ("src/a.cpp", "x + 4;", "x + 4 + 4;"), u=3)
    kvtool("apply")
    before = project.snapshot()
    assert files(kvtool("export", "--json")) == {}
    assert project.snapshot() == before


def test_fixup_goes_into_its_patch(applied: Tiny, kvtool, tmp_path) -> None:
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


def test_fixup_by_id_and_nested_and_amend(applied: Tiny, kvtool, tmp_path) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    edit(applied, "src/b.h", "bool dyn;", "bool kv_dyn;", "fixup! fixup! flag: a patch")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "amend! use: a patch\n\nuse: better words\n\nA body.")
    ran = kvtool("export", "--json")
    assert files(ran) == {"patches/flag.patch": "change", "patches/use.patch": "change"}
    assert b"Subject: use: better words" in (applied.root / "patches/use.patch").read_bytes()
    round_trip(applied, kvtool, tmp_path)


def test_new_files_go_to_cpp_by_path(applied: Tiny, kvtool, tmp_path) -> None:
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


def test_new_patch_and_new_file_from_one_commit(applied: Tiny, kvtool, tmp_path) -> None:
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


def test_rebased_history_reorders_the_series(applied: Tiny, kvtool, tmp_path) -> None:
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


def test_check_writes_nothing_and_fails_on_drift(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    before, head = applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--check", "--json")
    assert ran.code == 6 and ran.json["error"]["code"] == "drift"
    assert "patches/flag.patch (change)" in ran.json["error"]["why"]
    assert (applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")) == (before, head)


def test_export_touches_no_file_of_the_tree(applied: Tiny, kvtool) -> None:
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


def test_tag_that_skips_a_patch_leaves_it_alone(project: Tiny, kvtool, tmp_path) -> None:
    project.add_patch("later", ("src/b.h", "bool one;", "bool one; // new"), extra='from = "v2"\n')
    kvtool("apply")
    edit(project, "src/a.cpp", "x + 6;", "x + 6 + 6;", "six")
    assert files(kvtool("export", "--json")) == {"patches/six.patch": "add", "patches/series.toml": "change"}
    ids = [line for line in (project.root / "patches/series.toml").read_text().splitlines() if line.startswith("id")]
    assert ids == ['id = "flag"', 'id = "use"', 'id = "later"', 'id = "six"']
    round_trip(project, kvtool, tmp_path)


HOSTILE = """
[diff]
noprefix = true
mnemonicPrefix = true
context = 0
interHunkContext = 5
algorithm = patience
renames = copies
external = false
orderFile = {hooks}/order
suppressBlankEmpty = true
indentHeuristic = false
submodule = log
wsErrorHighlight = all
colorMoved = zebra
statNameWidth = 3
[diff "evil"]
textconv = false
command = false
binary = true
xfuncname = nothing
[filter "evil"]
clean = false
smudge = false
required = true
[merge]
renames = false
default = evil
[merge "evil"]
driver = false
[core]
attributesFile = {hooks}/attributes
excludesFile = {hooks}/excludes
whitespace = -trailing-space,cr-at-eol
safecrlf = true
fileMode = false
logAllRefUpdates = false
commentChar = auto
autocrlf = true
eol = crlf
hooksPath = {hooks}
abbrev = 4
quotePath = true
pager = false
[commit]
gpgsign = true
template = /nonexistent
[format]
signature = mine
attach = true
signOff = true
from = Other <other@example.invalid>
coverLetter = true
subjectPrefix = XX
suffix = .txt
useAutoBase = true
noprefix = true
pretty = oneline
notes = true
encodeEmailHeaders = false
forceInBodyFrom = true
numbered = true
outputDirectory = {hooks}/out
filenameMaxLength = 9
cc = <cc@example.invalid>
thread = deep
headers = "X-Mine: 1\\n"
[gpg]
program = false
[apply]
whitespace = error
[color]
ui = always
[i18n]
commitEncoding = ISO-8859-1
logOutputEncoding = ISO-8859-1
[am]
threeWay = true
keepcr = true
[mailinfo]
scissors = true
[push]
default = nothing
[transfer]
fsckObjects = true
hideRefs = refs/kvtool
[uploadpack]
hideRefs = refs/kvtool
[receive]
denyCurrentBranch = refuse
[safe]
bareRepository = explicit
[submodule]
recurse = true
[status]
showUntrackedFiles = no
branch = true
short = true
[log]
showSignature = true
[user]
name = Hostile
email = hostile@example.invalid
[fetch]
fsckObjects = true
[init]
templateDir = {hooks}/template
"""


def test_hostile_configuration_changes_no_byte(project: Tiny, kvtool, tmp_path, monkeypatch) -> None:
    def all_of_it(where: str) -> tuple[object, ...]:
        for name, value in (("KVTOOL_CACHE", "cache"), ("KVTOOL_TREE", "tree")):
            monkeypatch.setenv(name, str(tmp_path / f"{where}-{value}"))
        tree = tmp_path / f"{where}-tree"
        assert kvtool("apply").code == 0
        applied = git(tree, "rev-parse", "HEAD")
        if where == "hostile":  # in the tree's own configuration too
            with (tree / ".git/config").open("a") as config:
                config.write(HOSTILE.format(hooks=hooks))
            (tree / ".git/info/attributes").write_text("* diff=evil\n")
        file = tree / "src/b.h"
        file.write_bytes(file.read_bytes().replace(b"bool dynamic;", b"bool dynamic; // \xc3\xbc \t"))
        off = (
            "core.attributesFile=/dev/null",
            "commit.gpgsign=false",
            "commit.template=",
            "core.hooksPath=/dev/null",
            "core.safecrlf=false",
        )
        options = [part for setting in off for part in ("-c", setting)]
        git(tree, *options, "commit", "-qam", "fixup! flag", "--author", "A <a@example.invalid>")
        ran = kvtool("export", "--json")
        assert ran.code == 0, ran
        done = project.snapshot()
        kvtool("export", "--mailbox", tmp_path / f"{where}-mails")
        mails = [p.read_bytes() for p in sorted((tmp_path / f"{where}-mails").iterdir())]
        return applied, git(tree, "rev-parse", "HEAD"), done, mails

    hooks = tmp_path / "hooks"
    start = project.snapshot()
    plain = all_of_it("plain")
    for name, content in start.items():
        (project.root / name).write_bytes(content)
    write_files(hooks, {"template/info/attributes": "* -diff text eol=crlf\n"})
    (hooks / "order").write_text("*.h\n")
    (hooks / "attributes").write_text(
        "* diff=evil filter=evil merge=evil ident text eol=crlf working-tree-encoding=UTF-16\n"
    )
    (hooks / "excludes").write_text("*.cpp\n*.h\n")
    for name in ("post-checkout", "reference-transaction", "pre-commit", "applypatch-msg"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (Path.home() / ".gitconfig").write_text(HOSTILE.format(hooks=hooks))
    monkeypatch.setenv("GIT_DIFF_OPTS", "-u9")
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", "false")
    assert all_of_it("hostile") == plain


def test_apply_then_export_leaves_no_diff_under_hostile_configuration(
    project: Tiny, kvtool, tmp_path, monkeypatch
) -> None:
    before = project.snapshot()
    assert kvtool("apply").code == 0
    expected = git(project.tree, "rev-parse", "HEAD", "HEAD^{tree}")
    hooks = tmp_path / "hooks"
    write_files(
        hooks, {"order": "*.h\n", "attributes": "* diff=evil filter=evil merge=evil ident\n", "excludes": "*\n"}
    )
    for name in ("post-checkout", "reference-transaction", "pre-commit", "commit-msg", "post-commit", "pre-applypatch"):
        (hooks / name).write_text("#!/bin/sh\nexit 1\n")
        (hooks / name).chmod(0o755)
    (Path.home() / ".gitconfig").write_text(HOSTILE.format(hooks=hooks))
    monkeypatch.setenv("KVTOOL_CACHE", str(tmp_path / "hostile-cache"))
    monkeypatch.setenv("KVTOOL_TREE", str(tmp_path / "hostile-tree"))
    assert kvtool("apply").code == 0
    with (tmp_path / "hostile-tree/.git/config").open("a") as config:
        config.write(HOSTILE.format(hooks=hooks))
    for args in (("export", "--check"), ("export",), ("apply",), ("export", "--check")):
        assert kvtool(*args).code == 0, args
    assert kvtool("status", "--json").json["state"] == "clean"
    assert project.snapshot() == before
    sealed = ("-c", "core.hooksPath=/dev/null", "-c", "core.attributesFile=/dev/null")
    assert git(tmp_path / "hostile-tree", *sealed, "rev-parse", "HEAD", "HEAD^{tree}") == expected
    assert kvtool("diff", ".", "tree", "--json").json["same"] is True


def test_mailbox_is_a_plain_series(applied: Tiny, kvtool, tmp_path) -> None:
    before = applied.snapshot()
    ran = kvtool("export", "--mailbox", tmp_path / "mails", "--json")
    assert ran.code == 0 and len(ran.json["mailbox"]) == 3
    assert applied.snapshot() == before
    plain = tmp_path / "plain"
    git(tmp_path, "clone", "-q", "--branch", "v1", str(applied.upstream), str(plain))
    git(plain, "am", "-q", *ran.json["mailbox"])
    assert git(plain, "rev-parse", "HEAD^{tree}") == git(applied.tree, "rev-parse", "HEAD^{tree}")
    assert kvtool("export", "--mailbox", tmp_path / "mails").code == 0  # an earlier mailbox is replaced
    (tmp_path / "mails/note.txt").write_text("mine")
    assert kvtool("export", "--mailbox", tmp_path / "mails").code == 2
    assert (tmp_path / "mails/note.txt").exists()
    assert kvtool("export", "--mailbox", tmp_path / "x", "--check").code == 2


# --- refusals -----------------------------------------------------------------------------------------------------


def refused(project: Tiny, kvtool, code: int, *words: str) -> None:
    before, head = project.snapshot(), git(project.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--json")
    assert ran.code == code, ran
    said = " ".join(str(value) for value in ran.json["error"].values())
    assert all(word in said for word in words), said
    assert (project.snapshot(), git(project.tree, "rev-parse", "HEAD")) == (before, head)


def test_nothing_applied(project: Tiny, kvtool) -> None:
    assert kvtool("export").code == 4


def test_uncommitted_edit(applied: Tiny, kvtool) -> None:
    (applied.tree / "src/b.h").write_text("mine")
    refused(applied, kvtool, 4, "uncommitted", "src/b.h")


def test_project_changed_too(applied: Tiny, kvtool) -> None:
    (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    refused(applied, kvtool, 4, "kvtool apply")
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! flag")
    refused(applied, kvtool, 4, "branch mine", "cherry-pick")
    # and the way that it names works
    head = git(applied.tree, "rev-parse", "HEAD~1")
    git(applied.tree, "branch", "mine")
    git(applied.tree, "reset", "-q", "--hard", head)
    assert kvtool("apply").code == 0
    git(applied.tree, "cherry-pick", f"{head}..mine")
    assert files(kvtool("export", "--json")) == {"patches/flag.patch": "change"}
    assert (applied.root / "cpp/src/new.cpp").read_text() == "int newer;\n"


def test_same_change_on_both_sides_is_no_conflict(applied: Tiny, kvtool) -> None:
    (applied.root / "cpp/src/new.cpp").write_text("int newer;\n")
    (applied.tree / "src/new.cpp").write_text("int newer;\n")
    git(applied.tree, "commit", "-qam", "newer")
    assert files(kvtool("export", "--json")) == {}
    assert kvtool("status", "--json").json["state"] == "clean"


def test_merge_commit(applied: Tiny, kvtool) -> None:
    git(applied.tree, "checkout", "-q", "-b", "side", "HEAD~1")
    git(applied.tree, "commit", "-q", "--allow-empty", "-m", "side")
    git(applied.tree, "checkout", "-q", "kvtool/v1")
    git(applied.tree, "merge", "-q", "--no-ff", "-m", "merged", "side")
    refused(applied, kvtool, 4, "is a merge")


def test_fixup_of_nothing(applied: Tiny, kvtool) -> None:
    edit(applied, "src/b.h", "bool dynamic;", "bool dyn;", "fixup! no such patch")
    refused(applied, kvtool, 4, "fixes nothing", "no such patch")


def test_fixup_that_needs_a_later_patch(applied: Tiny, kvtool) -> None:
    edit(applied, "src/a.cpp", "x + 2 + grown();", "x + 2 + grown(1);", "fixup! flag")
    refused(applied, kvtool, 3, "does not go into its patch", "later patch")
    assert git(applied.tree, "status", "--porcelain") == ""


def test_fold_that_would_change_the_result(applied: Tiny, kvtool) -> None:
    """A fixup of an early patch takes back what a later commit does: folded, it would do nothing."""
    edit(applied, "src/a.cpp", "x + 6;", "x + 66;", "six")
    edit(applied, "src/a.cpp", "x + 66;", "x + 6;", "fixup! flag")
    refused(applied, kvtool, 3, "cannot be folded", "src/a.cpp")


def test_patch_whose_commit_is_gone(applied: Tiny, kvtool) -> None:
    git(applied.tree, "reset", "-q", "--hard", "HEAD~1")
    refused(applied, kvtool, 4, "'use'", "series.toml")


@pytest.mark.parametrize("path", [".hidden", "src/.x", "src/x~", "README.md"])
def test_file_that_cpp_cannot_hold(applied: Tiny, kvtool, path: str) -> None:
    (applied.tree / path).write_text("x")
    git(applied.tree, "add", "-f", path)
    git(applied.tree, "commit", "-qm", "odd")
    refused(applied, kvtool, 4, path, "cannot be exported")


def test_other_history(applied: Tiny, kvtool) -> None:
    git(applied.tree, "checkout", "-q", "--orphan", "other")
    git(applied.tree, "commit", "-qm", "other")
    refused(applied, kvtool, 4, "does not come from")


# --- all or nothing -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fail_at", [0, 1, 2])
def test_failure_while_writing_puts_everything_back(applied: Tiny, kvtool, monkeypatch, fail_at: int) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    git(applied.tree, "add", "-A")
    edit(applied, "src/a.cpp", "x + 6;", "x + 6 + more;", "six")
    real, calls = flowback.put_file, []

    def failing(path: Path, change: flowback.Change) -> None:
        if path.is_relative_to(applied.root / "cpp") or path.is_relative_to(applied.root / "patches"):
            calls.append(path)
            if len(calls) == fail_at + 1:
                raise OSError(28, "No space left on device")
        real(path, change)

    monkeypatch.setattr(flowback, "put_file", failing)
    before, head = applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")
    ran = kvtool("export", "--json")
    assert ran.code == 1 and ran.json["error"]["code"] == "disk"
    assert (applied.snapshot(), git(applied.tree, "rev-parse", "HEAD")) == (before, head)
    monkeypatch.undo()


@pytest.mark.parametrize("after", [0, 1, 2, 3])
def test_killed_export_can_be_run_again(applied: Tiny, kvtool, after: int) -> None:
    (applied.tree / "src/more.cpp").write_text("int more;\n")
    git(applied.tree, "add", "-A")
    edit(applied, "src/a.cpp", "x + 6;", "x + 6 + more;", "six")
    code = (
        "import os, sys; from kvtool import cli; from kvtool.tree import flowback\n"
        "real, calls = flowback.put_file, []\n"
        "def put(path, change):\n"
        f"    if str(path).startswith({str(applied.root)!r} + '/cpp') or '/project/patches' in str(path):\n"
        f"        calls.append(1)\n        if len(calls) > {after}: os._exit(137)\n"
        "    real(path, change)\n"
        "flowback.put_file = put; sys.exit(cli.run(['export']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=applied.root)
    assert done.returncode == (137 if after < 3 else 0)
    if after < 3:
        assert kvtool("status", "--json").json["state"] == "interrupted"
        assert kvtool("apply").code == 4
    assert kvtool("export").code == 0
    assert kvtool("status", "--json").json["state"] == "clean"
    assert (applied.root / "cpp/src/more.cpp").read_text() == "int more;\n"
    assert (applied.root / "patches/six.patch").exists()
