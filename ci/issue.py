"""Open one GitHub issue for each breakage that `kvtool canary` found.

Usage: python ci/issue.py REPORT (needs gh and GH_TOKEN)

The report has a key that identifies the breakage, and the text of the issue contains this key. If an open issue has the
key, nothing is done. So a breakage that lasts a week is one issue, and not seven. If nothing is broken, or if the
machine failed, no issue is opened.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "kvtool-canary-key"
# codes of errors of the machine, which are no breakage of the series
NOT_THE_SERIES = ("network", "missing_tool", "disk", "usage")


def gh(*args: str, text: str | None = None) -> str:
    """Run gh, and return its output."""
    done = subprocess.run(["gh", *args], input=text, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"error: gh {args[0]} {args[1]} failed: {done.stderr.strip()}")
    return done.stdout


def body(report: dict[str, Any]) -> str:
    """Return the text of the issue, for the person who repairs the breakage."""
    broken = "\n".join(f"- `{b['step']}` {b['patch']} {b['what']}" for b in report["breakages"])
    steps = "\n".join(f"| {s['name']} | {s['outcome']} | {s['summary']} |" for s in report["steps"])
    log = next((s["log"] for s in report["steps"] if s["log"]), "")
    quoted = f"\n```\n{log.replace('```', '` ` `')}\n```\n" if log else ""
    return (
        f"First seen on llama.cpp {report['tag']} (tree `{report['tree']}`), "
        f"with the series made for {report['locked']}.\n\n"
        f"{broken}\n\n| step | outcome | |\n|---|---|---|\n{steps}\n{quoted}\n"
        f"To see it: `kvtool canary {report['tag']}`; to repair it: `{report['error']['next'] or 'see the log'}`\n\n"
        f"{MARK}: {report['key']}\n"
    )


def main(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    if not report["key"] or report["error"]["code"] in NOT_THE_SERIES:
        print("no breakage, no issue")
        return
    search = (
        "--state",
        "open",
        "--search",
        f'"{MARK}: {report["key"]}" in:body',
        "--json",
        "number,body",
        "--limit",
        "20",
    )
    for issue in json.loads(gh("issue", "list", *search)):
        # gh searches for words, so it also finds issues with other keys
        if f"{MARK}: {report['key']}" in issue["body"]:
            print(f"issue #{issue['number']} has this breakage already")
            return
    first = report["breakages"][0]
    title = f"canary: {first['step']}: {first['patch'] or first['where']} on llama.cpp {report['tag']}"
    print(gh("issue", "create", "--title", title, "--body-file", "-", text=body(report)).strip())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
