"""A plugin: with `pytest -p tests.e2e.late`, what a client asks a server for comes late, as on a busy machine.

The server goes on generating meanwhile, so a test that needs a request to come soon fails.
"""

from __future__ import annotations

import random
import time
from typing import Any

import httpx
import pytest

SECONDS = 0.4  # at most


def pytest_configure() -> None:
    random_ = random.Random(1)
    send = httpx.Client.send

    def late(self: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        time.sleep(random_.uniform(0, SECONDS if request.method == "POST" else SECONDS / 8))
        return send(self, request, **more)

    pytest.MonkeyPatch().setattr(httpx.Client, "send", late)
