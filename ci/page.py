"""Chat with a model through llama-server's own web page, in a Chromium without a window.

Usage: python ci/page.py BIN_DIR VOCABULARY

BIN_DIR has a llama-server that was built with --ui. VOCABULARY is a vocabulary file of upstream's tree. The model has
random weights. The check passes if the page shows the question and an answer, and if the cache grew. The script
controls the browser through a pipe with Chrome's own protocol, so only the browser is needed. The environment variable
CHROMIUM can name the path of the browser.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from kvtool.verify import models
from kvtool.verify.server import llama_server
from kvtool.verify.texts import FLAG, growths, prompt

BROWSERS = ("chromium", "google-chrome", "chromium-browser")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
# Find the parts of the page by their role for a user, and not by names of styles.
WRITE = """(() => {
    const box = document.querySelector('textarea');
    if (!box || box.disabled) return false;
    box.focus();
    return document.activeElement === box;
})()"""
QUESTION = "document.querySelector('[aria-label^=\"User message\"]')?.innerText"
ANSWER = "document.querySelector('[aria-label^=\"Assistant message\"] p')?.innerText"


class Browser:
    """Control a page of a Chromium that reads from file descriptor 3 and writes to 4.

    A message is JSON with a zero byte at the end.
    """

    def __init__(self, profile: Path) -> None:
        program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
        if program is None:
            sys.exit(f"NOT RUN: none of {', '.join(BROWSERS)} is installed")
        (theirs_in, self._to), (self._from, theirs_out) = os.pipe(), os.pipe()

        def wire() -> None:
            # first duplicate both to high numbers, so that setting 3 and 4 does not close one of them
            high = os.dup2(theirs_in, 100), os.dup2(theirs_out, 101)
            os.dup2(high[0], 3)
            os.dup2(high[1], 4)

        argv = [program, *QUIET, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(argv, preexec_fn=wire, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(theirs_in)
        os.close(theirs_out)
        self._seen, self._number, self._session = b"", 0, ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: object) -> dict[str, Any]:
        """Send one command and return its result. Events that the browser sends before the result are ignored."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(
            self._to, json.dumps(message | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while True:
            while b"\0" not in self._seen:
                chunk = os.read(self._from, 65536)
                if not chunk:
                    sys.exit("the browser is gone")
                self._seen += chunk
            line, _, self._seen = self._seen.partition(b"\0")
            answer = json.loads(line)
            if answer.get("id") == self._number:
                if "error" in answer:
                    sys.exit(f"{method}: {answer['error']}")
                return dict(answer["result"])

    def value(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def wait(self, script: str, what: str, seconds: float = 120) -> Any:
        """Wait until the script returns a true value, and return the value."""
        end = time.monotonic() + seconds
        while not (value := self.value(script)):
            if time.monotonic() > end:
                sys.exit(
                    f"FAILED: {what} within {seconds:g} s; the page shows:\n{self.value('document.body.innerText')}"
                )
            time.sleep(0.2)
        return value

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bin_dir", type=Path)
    parser.add_argument("vocabulary", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvtool-page-") as place:
        work = Path(place)
        body = models.cache_model(models.Geometry("page", layers=2, kv_heads=2, head_size=32), work, models.CONTEXT)
        model = models.text_model(body, given.vocabulary, work)
        arguments = [FLAG, "-c", "4096", "-t", "1", "-n", "64", "--no-warmup", "-lv", "4"]
        with llama_server(given.bin_dir / "llama-server", model, arguments, work / "log") as server:
            chat(Browser(work / "profile"), server.url, prompt(1, 300))
            log = server.log
    grown = growths(log)
    if not grown:
        sys.exit(f"FAILED: the cache did not grow:\n{log[-2000:]}")
    print(f"the page answered; the cache grew {grown}")
    return 0


def chat(browser: Browser, url: str, question: str) -> None:
    """Ask a question in the page, and wait until the page shows more than the question."""
    try:
        browser.call("Page.navigate", url=url)
        browser.wait(WRITE, "no box to write in")
        browser.call("Input.insertText", text=question)
        for kind in ("keyDown", "keyUp"):
            enter = {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13}
            browser.call("Input.dispatchKeyEvent", type=kind, text="\r" if kind == "keyDown" else "", **enter)
        shown = str(browser.wait(QUESTION, "no question"))
        if question[-40:] not in shown:
            sys.exit(f"FAILED: the page shows another question: {shown}")
        answer = str(browser.wait(ANSWER, "no answer"))
        print("answer:", " ".join(answer.split())[:200])
    finally:
        browser.close()


if __name__ == "__main__":
    sys.exit(main())
