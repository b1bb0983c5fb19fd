"""Ask a patched llama-server for the memory of its caches and the state of its slots.

/props and /slots are read, but never /metrics: each request for /metrics resets averages that llama-server computes, so
other clients of /metrics would get averages over a shorter period. A request for /slots would wake a sleeping server,
so a sleeping server is not asked for its slots.
"""

import contextlib
import re
from typing import Any

import httpx

from kvtool.errors import MeasureError, NetworkError, UsageError
from kvtool.result import from_plain
from kvtool.top.reading import DEFAULT_URL, Budget, Conversations, Memory, Reading, State, memory_of, slot_of

SECONDS = 10.0  # seconds until a request fails; the server answers during a computation, too


class LoadingError(NetworkError):
    """Report that the server runs, but is still loading its model."""


class Server(contextlib.ExitStack):
    """Send requests to one server.

    url: its address for messages, without the user name and the password
    """

    def __init__(self, url: str, api_key: str = "") -> None:
        super().__init__()
        parsed = _parsed(url)
        self.url = str(parsed.copy_with(userinfo=b"")).rstrip("/")
        key = api_key.split(",")[0].strip()  # LLAMA_API_KEY can hold several keys, because the server reads it, too
        if not key.isprintable():
            raise UsageError(
                "the API key has characters that are not allowed in an HTTP header",
                next_step="correct LLAMA_API_KEY or --api-key",
            )
        headers = {b"Authorization": b"Bearer " + key.encode()} if key else None
        # do not use a proxy for a server on this machine
        here = parsed.host in ("localhost", "::1") or parsed.host.startswith("127.")
        http = httpx.Client(base_url=parsed, headers=headers, timeout=SECONDS, trust_env=not here)
        self._http = self.enter_context(http)

    def read(self) -> Reading:
        """Read the current numbers.

        Raises NetworkError if there is no answer (LoadingError while the model is loaded), UsageError if the API key is
        missing or wrong, and MeasureError if the server does not report these numbers.
        """
        props = self._get("/props")
        try:
            memory = self._memory(props)
            state = State.ASLEEP if props["is_sleeping"] else State.AWAKE
            said = self._get("/slots") if props["endpoint_slots"] and state == State.AWAKE else ()
            slots = tuple(map(slot_of, said)) if props["endpoint_slots"] else None
            budget = from_plain(Budget, props["kv_budget"]) if "kv_budget" in props else None
            stored = from_plain(Conversations, props["conversations"]) if "conversations" in props else None
            return Reading(state, _model(props), str(props["build_info"]), memory, slots, budget, stored)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as err:
            raise MeasureError(
                f"{self.url} answers in a way that kvtool top cannot read",
                why=f"{type(err).__name__}: {err}",
                next_step="use the same version of the server and kvtool: kvtool apply && kvtool build",
            ) from err

    def _memory(self, props: dict[str, Any]) -> tuple[Memory, ...]:
        if props.get("role") == "router":
            raise MeasureError(
                f"{self.url} is a router, which has no cache itself",
                next_step="watch the server of one model: its port is in the router's log",
            )
        if "kv_cache" not in props:
            raise MeasureError(
                f"{self.url} does not report the memory of its KV cache",
                why="it runs without --kv-dynamic, or is upstream's own llama-server",
                next_step="start it with --kv-dynamic; kvtool build builds a server that supports it",
            )
        return tuple(memory_of(name, said) for name, said in props["kv_cache"].items())

    def _get(self, path: str) -> Any:
        try:
            answer = self._http.get(path)
        except httpx.TimeoutException as err:
            why = f"there was no answer within {SECONDS:g} s"
            raise NetworkError(f"{self.url} does not answer", why=why, next_step=_START_IT) from err
        except httpx.HTTPError as err:
            why = str(err) or type(err).__name__
            raise NetworkError(f"no server answers at {self.url}", why=why, next_step=_START_IT) from err
        code, has_key = answer.status_code, "Authorization" in self._http.headers
        if code in (401, 403):
            which, given = ("another", "the given key") if has_key else ("an", "a request without a key")
            raise UsageError(
                f"{self.url} wants {which} API key",
                why=f"it answered HTTP {code} to {given}",
                next_step="put a key of the server into LLAMA_API_KEY, or pass it with --api-key",
            )
        if code == 503:
            raise LoadingError(
                f"{self.url} is not ready",
                why=_reason(answer),
                next_step="wait until the model is loaded, then run the command again",
            )
        if code in (502, 504):
            raise NetworkError(
                f"the proxy at {self.url} could not reach llama-server", why=f"{path}: HTTP {code}", next_step=_START_IT
            )
        if code != 200:
            raise self._stranger(path, f"HTTP {code}")
        try:
            return answer.json()
        except ValueError as err:
            raise self._stranger(path, "its answer is not JSON") from err

    def _stranger(self, path: str, why: str) -> MeasureError:
        return MeasureError(
            f"{self.url} is not a llama-server that kvtool top can read",
            why=f"{path}: {why}",
            next_step="pass the address of llama-server, with its --api-prefix if it has one",
        )


_START_IT = "start it, or pass its address (its --host, --port)"


def _reason(answer: httpx.Response) -> str:
    """Return the server's own error message, for example "Loading model"."""
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {answer.status_code}"


def _parsed(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL as err:
        raise UsageError(f"{url} is not an address", why=str(err), next_step=f"kvtool top {DEFAULT_URL}") from err
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise UsageError(f"{url} is not an address of a web server", next_step=f"kvtool top {DEFAULT_URL}")
    return parsed.copy_with(query=None, fragment=None)


def _model(props: dict[str, Any]) -> str:
    """Return the server's name for its model. If that is a path, return the name of the file."""
    name = str(props["model_alias"])
    return re.split(r"[/\\]", name)[-1] if name == props.get("model_path") else name
