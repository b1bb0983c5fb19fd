"""Test --kv-budget with a projector and a draft model. They count as a part of the budget while they are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvtool.errors import VerifyError
from kvtool.verify import models
from kvtool.verify.projector import projector
from kvtool.verify.texts import prompt
from tests.e2e.budgets import LADDER, MIB, Watched, props, within
from tests.e2e.conftest import Real
from tests.e2e.projector import projector_of_width, see
from tests.e2e.servers import completion, part, refusal, until, until_it_generates, until_logged, weights


class Seeing(Watched):
    """Hold a server whose projector is loaded and unloaded."""

    def load(self) -> int:
        part(self.server, "mmproj", "load")
        loaded = int(props(self.server)["kv_budget"]["loaded_bytes"])
        assert loaded == self.server.http.get("/mmproj").json()["planned_bytes"] > 8 * MIB
        self.look()
        return loaded

    def unload(self) -> None:
        part(self.server, "mmproj", "unload")
        assert props(self.server)["kv_budget"]["loaded_bytes"] == 0


@pytest.fixture
def seeing(real: Real, large_cell_model: Path, tmp_path: Path, marker: None) -> Iterator[Seeing]:
    mmproj = projector(large_cell_model, real.work)
    args = (*LADDER, "--kv-unified", "--mmproj", mmproj, "--mmproj-lazy")
    with within(real, large_cell_model, tmp_path, 96, *args) as watched:
        yield Seeing(watched.server, watched.mib)


def test_idle_slots_yield_to_projector(seeing: Seeing) -> None:
    """Load the projector while two slots are idle. The slot that was not used for the longer time is cleared first."""
    seeing.ask(1, 800)
    seeing.ask(0, 600)
    assert "purging" not in seeing.server.log
    seeing.load()
    assert seeing.look() == ("f16", 0, 0)
    until_logged(seeing.server, "purging slot 1")
    assert seeing.ask(0, 600)["timings"]["cache_n"] > 500
    seeing.unload()


def test_idle_slots_yield_to_image(seeing: Seeing) -> None:
    """Expect that idle slots lose their cells before the cells of other slots get a smaller type."""
    seeing.load()
    seeing.ask(1, 800)
    assert see(seeing.server, *range(40), id_slot=0).status_code == 200  # 16 cells for each image
    assert seeing.look() == ("f16", 0, 0)
    until_logged(seeing.server, "purging slot 1")


def test_idle_slots_return_after_projector(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    parts = ("--kv-unified", "--mmproj", projector(large_cell_model, real.work), "--mmproj-lazy")
    with within(real, large_cell_model, tmp_path, 96, *parts, "--no-cache-idle-slots", "--cache-ram", "200") as watched:
        watched.ask(1, 800)
        watched.ask(0, 600)
        part(watched.server, "mmproj", "load")
        part(watched.server, "mmproj", "unload")
        until_logged(watched.server, "purging slot 1")
        again = completion(watched.server, prompt(1, 800) + " river", 8)
        assert again["timings"]["cache_n"] >= 800


def test_running_slot_yields_precision_to_projector(seeing: Seeing) -> None:
    """Load the projector while a slot generates: the cells of this slot must change to a smaller type.

    After the projector is unloaded, a new conversation starts with the first type.
    """
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(completion, seeing.server, prompt(0, 1390), 500, id_slot=0)
        until_it_generates(seeing.server, running)
        assert seeing.look() == ("f16", 0, 0)
        seeing.load()
        assert not running.done()
        assert seeing.look() == ("q8_0", 1, 0)
        assert running.result()["tokens_predicted"] == 500
    seeing.unload()
    seeing.server.slot("erase", 0)
    seeing.ask(0, 1000)
    assert seeing.look() == ("f16", 1, 1)


def test_projector_beyond_budget_is_refused(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    # This projector has 68 MiB and is for another model. The server refuses it because of its size first.
    large = projector_of_width(tmp_path / "projector.gguf", 1024)
    with within(real, large_cell_model, tmp_path, 48, *LADDER, "--mmproj", large, "--mmproj-lazy") as watched:
        watched.ask(0, 100)
        for _ in range(2):
            code, kind, message = refusal(watched.server.http.post("/mmproj", json={"action": "load"}))
            assert (code, kind) == (503, "out_of_memory_error")
            assert "the budget has no room for the multimodal projector" in message
        assert watched.ask(0, 100)["timings"]["cache_n"] > 90
        assert watched.look() == ("f16", 0, 0)
        assert props(watched.server)["kv_budget"]["loaded_bytes"] == 0
    with (
        pytest.raises(VerifyError) as failed,
        within(real, large_cell_model, tmp_path, 34, "--mmproj", projector(large_cell_model, real.work)),
    ):
        pass
    assert "the budget has no room for the multimodal projector" in failed.value.output


def test_draft_on_demand_yields_to_projector(real: Real, model: Path, mmproj: Path, tmp_path: Path) -> None:
    parts = ("--mmproj", mmproj, "--mmproj-lazy", "-md", model, "--spec-type", "draft-simple", "--draft-lazy-auto", "0")
    with within(real, model, tmp_path, weights(model) + 12, "-np", "1", *parts) as watched:
        http = watched.server.http
        first = watched.ask(0, 100)
        assert "draft_n" in first["timings"]
        part(watched.server, "mmproj", "load")
        watched.look()
        assert http.get("/speculative").json()["state"] == "unloaded"
        second = watched.ask(0, 100)  # a draft model is loaded only into free memory
        assert (second["content"], "draft_n" in second["timings"]) == (first["content"], False)
        assert http.get("/mmproj").json()["state"] == "loaded"
        part(watched.server, "mmproj", "unload")
        part(watched.server, "speculative", "load")
        assert "draft_n" in watched.ask(0, 100)["timings"]


def in_two_files(model: Path, out: Path) -> Path:
    """Divide the model into two files, and return the first."""
    from gguf import GGUFWriter

    reader = models.read_model(model)
    arch = reader.fields["general.architecture"].contents()
    writer = GGUFWriter(out / "split.gguf", arch, split_max_tensors=len(reader.tensors) // 2 + 1)
    models.copy_keys(reader, writer, lambda _name: True)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    models.seal(writer)
    return out / "split-00001-of-00002.gguf"


def test_draft_in_two_files(real: Real, model: Path, tmp_path: Path) -> None:
    """Load a draft model that is split into two files. The bytes of both must count, and a missing one is named."""
    split, taken = in_two_files(model, tmp_path), []
    for draft in (model, split):
        parts = ("-md", draft, "--spec-type", "draft-simple", "--draft-lazy")
        with within(real, model, tmp_path, weights(model) + 12, "-np", "1", *parts) as watched:
            part(watched.server, "speculative", "load")
            taken.append(props(watched.server)["kv_budget"]["loaded_bytes"])
            assert "draft_n" in watched.ask(0, 100)["timings"]
            if draft == split:
                part(watched.server, "speculative", "unload")
                (tmp_path / "split-00002-of-00002.gguf").unlink()
                said = refusal(watched.server.http.post("/speculative", json={"action": "load"}))
                assert said[0] == 500 and "split-00002-of-00002.gguf': No such file" in said[2]
    assert taken[1] == pytest.approx(taken[0], rel=0.01)


@pytest.mark.parametrize("ladder", [(), LADDER])
def test_draft_on_demand_yields_to_cells(
    real: Real, large_cell_model: Path, model: Path, tmp_path: Path, ladder: tuple[str, ...]
) -> None:
    """Expect that the draft model is unloaded before a prompt is refused, and before cells get a smaller type."""
    draft = ("--kv-unified", "-md", model, "--spec-type", "draft-simple", "--draft-lazy-auto", "0")
    with within(real, large_cell_model, tmp_path, 96, *ladder, *draft) as watched:

        def state() -> str:
            return str(watched.server.http.get("/speculative").json()["state"])

        assert "draft_n" in watched.ask(0, 300)["timings"]
        assert state() == "loaded"
        for words in (900, 1000):  # 57 MiB of f16 cells, which is more than the draft model leaves
            assert watched.ask(0, words)["tokens_predicted"] == 8
            assert (watched.look(), state()) == (("f16", 0, 0), "unloaded")


@pytest.mark.usefixtures("marker")
@pytest.mark.parametrize("ladder", [(), LADDER])
def test_projector_on_demand_yields_to_cells(
    real: Real, large_cell_model: Path, tmp_path: Path, ladder: tuple[str, ...]
) -> None:
    mmproj = projector(large_cell_model, real.work)
    args = ("--kv-unified", "--mmproj", mmproj, "--mmproj-lazy-auto", "0")
    with within(real, large_cell_model, tmp_path, 64, *ladder, *args) as watched:

        def state() -> str:
            return str(watched.server.http.get("/mmproj").json()["state"])

        assert see(watched.server, 1, id_slot=0).status_code == 200
        assert state() == "loaded"
        # 60 MiB of f16 cells, which is more than the projector leaves
        assert watched.ask(0, 930)["tokens_predicted"] == 8
        assert (watched.look(), state()) == (("f16", 0, 0), "unloaded")
        assert see(watched.server, 1, id_slot=0).status_code == 200


@pytest.mark.usefixtures("marker")
def test_waiting_image_yields_to_earlier_text(real: Real, large_cell_model: Path, tmp_path: Path) -> None:
    mmproj = projector(large_cell_model, real.work)
    args = ("--kv-unified", "-np", "3", "--mmproj", mmproj, "--mmproj-lazy-auto", "0")
    with within(real, large_cell_model, tmp_path, 64, *args) as watched, ThreadPoolExecutor(3) as pool:
        server = watched.server

        def is_waiting(slot: int) -> bool:
            return bool(server.http.get("/slots").json()[slot].get("is_waiting"))

        expected = see(server, 1, id_slot=2).json()["content"]
        part(server, "mmproj", "unload")
        running = pool.submit(completion, server, prompt(0, 200), 700, id_slot=0)
        until_it_generates(server, running)
        text = pool.submit(watched.ask, 1, 930)  # 60 MiB, which is more than the projector leaves
        until(lambda: is_waiting(1))
        image = pool.submit(see, server, 1, id_slot=2, cache_prompt=False)
        until(lambda: is_waiting(2))
        assert not running.done()
        assert text.result()["tokens_predicted"] == 8
        assert image.result().json()["content"] == expected
