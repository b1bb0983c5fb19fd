"""Test that memory is returned to the system by --kv-idle-release and when a slot is erased."""

from __future__ import annotations

import time
from pathlib import Path

from kvtool.verify.server import LlamaServer
from kvtool.verify.texts import prompt
from tests.e2e.conftest import Real
from tests.e2e.servers import completion, resident, serving, until

ARGS = ("-c", "16384", "-np", "2", "--kv-unified", "--no-warmup")
MIB = 1024 * 1024


def committed(server: LlamaServer) -> int:
    return int(server.http.get("/props").json()["kv_cache"]["target"]["committed_bytes"])


def test_idle_slots_release_memory(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    with serving(
        real, large_cell_model, tmp_path / "log", *ARGS, "--cache-ram", "0", "--kv-idle-release", "2"
    ) as server:
        completion(server, prompt(3, 20), 1, id_slot=0)  # the first batch allocates other memory
        before = resident(server)
        completion(server, prompt(1, 300), 1, id_slot=0)
        completion(server, prompt(2, 1200), 1, id_slot=1)
        until(lambda: committed(server) <= 16 * MIB)  # the size of the cache at the start
        until(lambda: resident(server) < before + 24 * MIB)  # 64 KiB for each token
        assert completion(server, prompt(1, 100), 1)["timings"]["cache_n"] == 0


def test_used_slot_keeps_cells(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    # longer than the machine may be busy with other things
    args = (*ARGS, "--no-cache-idle-slots", "--kv-idle-release", "4")
    with serving(real, large_cell_model, tmp_path / "log", *args) as server:
        completion(server, prompt(1, 100), 1, id_slot=0)
        text = prompt(2, 100)
        until(lambda: completion(server, text, 1, id_slot=1) and "giving back the cells" in server.log)
        assert completion(server, text, 1, id_slot=1)["timings"]["cache_n"] > 100


def test_idle_release_is_off_by_default(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    with serving(real, large_cell_model, tmp_path / "log", *ARGS, "--kv-dynamic") as server:
        completion(server, prompt(1, 600), 1)
        taken = committed(server)
        assert taken > 16 * MIB  # the size of the cache at the start
        time.sleep(2.5)
        assert committed(server) == taken


def test_erased_slot_releases_memory(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    with serving(
        real, large_cell_model, tmp_path / "log", *ARGS, "--kv-dynamic", "--slot-save-path", tmp_path
    ) as server:
        completion(server, prompt(1, 20), 1, id_slot=0)  # the first batch allocates other memory
        server.slot("erase", 0)
        before = resident(server)
        completion(server, prompt(2, 1500), 1, id_slot=0)
        taken = committed(server)
        assert taken >= 96 * MIB
        full = resident(server)
        server.slot("erase", 0)
        assert full - resident(server) >= 0.95 * (taken - committed(server))
        assert committed(server) <= 16 * MIB
        assert resident(server) < before + 24 * MIB
