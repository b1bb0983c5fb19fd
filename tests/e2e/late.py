"""Delay each request of a client, as on a busy machine. Use it with `pytest -p tests.e2e.late`.

The server continues to generate during the delay. So a test fails if it depends on a request that arrives quickly.
"""

from __future__ import annotations

import random
import time
from typing import Any

import httpx
import pytest

SECONDS = 0.4  # largest delay in seconds


def pytest_configure() -> None:
    random_ = random.Random(1)
    send = httpx.Client.send

    def late(self: httpx.Client, request: httpx.Request, **more: Any) -> httpx.Response:
        time.sleep(random_.uniform(0, SECONDS if request.method == "POST" else SECONDS / 8))
        return send(self, request, **more)

    pytest.MonkeyPatch().setattr(httpx.Client, "send", late)
