"""Make an upstream tag the current one of a lock file: python ci/pin.py LOCK TAG TREE_ID."""

import datetime
import sys
from pathlib import Path

import tomlkit


def pin(lock: Path, tag: str, tree: str) -> None:
    """Append the tag as the newest one, or take the entry it has; one that names another tree is an error."""
    document = tomlkit.parse(lock.read_text())
    known = {entry["tag"]: entry for entry in document["upstream"]}
    if tag not in known:
        entry = tomlkit.table()
        entry.update({"tag": tag, "date": datetime.date.today().isoformat(), "tree": tree, "sources": []})
        document["upstream"].append(entry)
    elif known[tag]["tree"] != tree:
        sys.exit(f"error: {tag} is pinned as tree {known[tag]['tree']}, and upstream has {tree}: the tag was moved")
    document["current"] = tag
    lock.write_text(tomlkit.dumps(document))


if __name__ == "__main__":
    pin(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
