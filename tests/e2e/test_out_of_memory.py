"""Let memory run out while the cache grows: the request gets an error, and everything else continues.

LLAMA_KV_DYNAMIC_FAIL=N makes the N-th allocation of a growth fail, and N+ also all later ones (see llama-kv-storage.h).
A growth by copy has one allocation for each of the two layers, and then one for the compute buffers.
test_every_allocation_fails.py tests the growth in place.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.result import parse_last_json_line
from kvtool.verify.server import Answer, LlamaServer, Request, llama_server
from kvtool.verify.texts import growths, prompt
from tests.e2e.conftest import Real

SHORT = Request("the stone under the bridge", 16)
LONG = Request(prompt(1, 850), 16)
ARGS = ("-c", "2048", "-np", "1", "-t", "1", "-lv", "4")


@pytest.fixture(scope="module")
def static_answer(real: Real, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Answer:
    log = tmp_path_factory.mktemp("static") / "server.log"
    with llama_server(real.bin / "llama-server", model, ARGS, log) as server:
        return server.complete(SHORT)


def answered(server: LlamaServer, request: Request) -> bool:
    try:
        server.complete(request)
    except VerifyError as err:
        assert "not enough memory for the KV cache" in err.why
        return False
    return True


@pytest.mark.parametrize("toy", ["minimax-m3-moe", "qwen4exp-moe", "deepseek32-moe"])
def test_start_without_memory_falls_back(real: Real, toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let growth in place find no memory at the start of a context.

    Both caches of the model then start with growth by copy, because their graphs need caches of the same size.
    """
    toy_file, args = real.toys / f"{toy}.gguf", ("--quick", "--checks", "generate")
    for fail in range(1, 13):
        monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", str(fail))
        done = process.capture([real.bin / "kv-check", "-m", toy_file, *args], check=False, error=VerifyError)
        said = parse_last_json_line(done.stdout) or {}
        refused = "returned 0 on the static side, 1 on the dynamic side" in str(said.get("reason"))  # the growth failed
        assert said.get("status") == "same" or refused, (fail, said.get("reason"))


@pytest.mark.parametrize("fail", ["1", "2", "3", "1+", "2+", "3+"])
def test_server_survives_failed_growth(
    real: Real, model: Path, static_answer: Answer, fail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_FAIL", fail)
    monkeypatch.setenv("LLAMA_KV_DYNAMIC_STORAGE", "copy")
    with llama_server(real.bin / "llama-server", model, (*ARGS, "--kv-dynamic"), tmp_path / "server.log") as server:
        assert server.complete(SHORT) == static_answer
        # the first long request may succeed, because the server tries again with smaller batches, which need less
        # memory
        answers = [answered(server, LONG), answered(server, LONG)]
        assert server.complete(SHORT).content == static_answer.content
    log = server.log
    assert growths(log)
    if fail.startswith("3"):
        # The cache first grows by less than it would like, and then not at all, so that memory is left for the compute
        # buffers.
        assert ("failed to reserve the compute buffers" in log) == (fail == "3+")
    else:
        assert "not enough memory" in log
    assert answers[1] == (not fail.endswith("+"))
