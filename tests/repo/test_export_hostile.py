"""Test that no git setting of the user changes a byte of the results of kvtool export and apply."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import Tiny, git, write_files

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


def test_hostile_configuration_changes_nothing(project: Tiny, kvtool, tmp_path, monkeypatch) -> None:
    def all_of_it(where: str) -> tuple[object, ...]:
        for name, value in (("KVTOOL_CACHE", "cache"), ("KVTOOL_TREE", "tree")):
            monkeypatch.setenv(name, str(tmp_path / f"{where}-{value}"))
        tree = tmp_path / f"{where}-tree"
        assert kvtool("apply").code == 0
        applied = git(tree, "rev-parse", "HEAD")
        if where == "hostile":  # the settings are also in the tree's own .git/config
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


def test_hostile_configuration_causes_no_drift(project: Tiny, kvtool, tmp_path, monkeypatch) -> None:
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
