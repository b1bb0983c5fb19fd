"""Test loading and unloading draft models that read data of the target.

These are MTP layers, and a draft model that shares the cells of its target.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from kvtool.verify import drafts
from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, memory_is_plain, resident, serving
from tests.e2e.speculative import ONE, accepted, act, state, unloading, until_it_is

MIB = 1024 * 1024
MTP = ("--spec-type", "draft-mtp", "--spec-draft-n-max", "4")


@pytest.fixture(scope="module")
def layered(real: Real) -> Path:
    """Return a model with an MTP layer."""
    return drafts.mtp_model(real.text_model(drafts.MTP_TOY), real.work)


def test_mtp_layers_load_and_unload(real: Real, layered: Path, tmp_path: Path) -> None:
    """Load and unload the MTP layer within a text, between prompts from the cache, and with checkpoints."""
    texts = [prompt(seed, 200) for seed in (1, 2)]
    args = ("-c", "2048", "-np", "1", "--cache-ram", "100", "--slot-prompt-similarity", "0.5")

    def talk(server: LlamaServer, *, actions: bool) -> list[str]:
        out = []
        for number in range(8):
            if actions:
                act(server, "load" if number % 2 else "unload")
            for more, n in ((" and" * (number // 2), 24), (" the", 12)):
                answer = completion(server, texts[number % 2] + more, n)
                out.append(answer["content"])
                assert not actions or (accepted(answer) is not None) == (number % 2 == 1)
        return out

    with serving(real, layered, tmp_path / "log", *args) as server:
        expected = talk(server, actions=False)
        whole = completion(server, texts[0], 400)["content"]
    with serving(real, layered, tmp_path / "log", *args, *MTP) as server:
        assert talk(server, actions=True) == expected
        running = unloading(server, texts[0], 400)
        assert running["content"] == whole
        assert accepted(running) is not None


@memory_is_plain
def test_mtp_layer_releases_memory(real: Real, layered: Path, tmp_path: Path) -> None:
    args = ("-c", "32768", "-np", "1", "--cache-ram", "0", *MTP)
    with serving(real, layered, tmp_path / "log", *args, "--draft-lazy") as server:

        def use() -> int:
            taken: int = act(server, "load")["taken"]["resident_bytes"]
            assert accepted(completion(server, prompt(1, 300), 50, cache_prompt=False)) is not None
            return taken

        completion(server, prompt(1, 300), 50, cache_prompt=False)
        use()
        act(server, "unload")
        before = resident(server)
        for _ in range(5):
            use()
            assert act(server, "unload")["freed"]["resident_bytes"] > MIB
        assert resident(server) < before + 4 * MIB  # a new thread of the server has a heap of its own


def test_draft_sharing_cells_loads_and_unloads(real: Real, tmp_path: Path) -> None:
    """Expect that the shared cells stay."""
    target, draft = map(real.with_vocabulary, drafts.draft_pair(real.work))
    text = prompt(1, 200)
    with serving(real, target, tmp_path / "log", *ONE) as server:
        expected = completion(server, text, 1000)["content"]
    with serving(real, target, tmp_path / "log", *ONE, "-md", draft, *MTP, "--draft-lazy") as server:
        first = completion(server, text, 50)["content"]
        act(server, "load")
        second = completion(server, text + first, 50)
        assert accepted(second) is not None
        assert second["timings"]["cache_n"] > 200
        assert expected.startswith(first + second["content"])
        assert unloading(server, text, 1000)["content"] == expected


def test_mtp_layer_on_demand(real: Real, layered: Path, tmp_path: Path) -> None:
    with serving(real, layered, tmp_path / "log", *ONE, *MTP, "--draft-lazy-auto", "1") as server:
        assert state(server) == "unloaded"
        assert accepted(completion(server, prompt(1, 50), 50)) is not None
        until_it_is("unloaded", server)
