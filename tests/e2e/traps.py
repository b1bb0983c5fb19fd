"""What goes wrong inside llama.cpp when a KV cache grows, each with the line that prevents it and the run that sees it.

A trap's name says what goes wrong without that line. `broken` takes the line out; `run` passes as the tree is and must
fail, in the named way, when it is out. Traps that this design cannot fall into are at the end, with the reason and with
what tests the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.e2e.broken import Edit

CONTEXT = "src/llama-context.cpp"
CACHE = "src/llama-kv-cache.cpp"
DYNAMIC = "src/llama-kv-dynamic.cpp"
INPLACE = "src/llama-kv-dynamic-inplace.cpp"
STORAGE = "src/llama-kv-storage.cpp"
GROWTH = "src/llama-kv-growth.cpp"

CURRENT = "llama_kv_dynamic::current()"
DYNAMIC_CONTEXT = f"{CURRENT} && {CURRENT}->is_enabled()"

COPY = {"LLAMA_KV_DYNAMIC_STORAGE": "copy"}  # as on a device; without it host memory grows in place
DRAFT = "gemma4"  # not one of upstream's toys: the pair of kvtool/verify/drafts.py


@dataclass(frozen=True)
class Run:
    """One run of a program. model: a toy's name, or "" for a unit test; args: its arguments after the model."""

    model: str
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    program: str = "kv-check"

    @property
    def key(self) -> tuple[object, ...]:
        return (self.program, self.model, self.args, tuple(sorted(self.env.items())))


@dataclass(frozen=True)
class Trap:
    """sees: what must change when the line is out. One of

    - the name of a check of kv-check, which is then no longer "same"
    - "log: TEXT", which then stands in the program's log
    - "status: WORD", kv-check's verdict over the whole run
    - "exit", for a unit test: it fails
    """

    name: str
    broken: Edit | tuple[Edit, ...]  # several where one line stands in for the other
    run: Run
    sees: str

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (self.broken,) if isinstance(self.broken, Edit) else self.broken


def copies(model: str, checks: str, *args: str) -> Run:
    """kv-check on storage that grows by copy."""
    return Run(model, ("--quick", "--checks", checks, *args), COPY)


def inplace(model: str, checks: str, *args: str) -> Run:
    """kv-check on storage that grows in place, as host memory does."""
    return Run(model, ("--quick", "--checks", checks, *args))


def unit(program: str) -> Run:
    return Run("", (), {}, program)


def half_failed(model: str) -> Run:
    """A growth of which only the first of two caches, of two layers, gets its memory: they have two sizes then."""
    return copies(model, "no-memory", "--fail", "3+")


NO_EVEN_OUT = Edit(DYNAMIC, "even_out(res);", "void();")

GROWING = (
    Trap(
        "caches that mirror each other keep two sizes after a growth that fell short",
        NO_EVEN_OUT,
        copies("minimax-m3-moe", "no-memory", "--fail", "7"),
        "no-memory",
    ),
    Trap(
        "a mirrored cache does not grow with the one that asked first",
        Edit(DYNAMIC, "res = kv->dyn_grow(res) && res;", "if (kv->dyn_grow(res)) { break; }"),
        copies("deepseek32-moe", "prompt"),
        "prompt",
    ),
    Trap(
        "caches that mirror each other take steps of different sizes, each by the bytes of its own cells",
        Edit(DYNAMIC, "dyn->n_bytes_cell(n_max)", "kv->dyn_usage().reserved/n_max"),
        Run(
            "qwen4exp-moe",
            ("-c", "16384", "--kv-dynamic", "on", "-d", "4400", "-n", "2", "-r", "1", "-p", "8"),
            {**COPY, "LLAMA_KV_DYNAMIC_STEP": "1000000"},
            "kv-bench",
        ),
        "exit",
    ),
    Trap(
        "a request that was answered stays pending, and decode() tries forever",
        Edit(DYNAMIC, "is_pending = false;", ""),
        copies("llama-dense", "full", "--timeout", "10"),
        "full",
    ),
    Trap(
        "the compute buffers do not follow the size of the cache",
        Edit(DYNAMIC, "graph_reserve(n_tokens, n_seqs, n_outputs, mctx.get())", "(ggml_cgraph *) this"),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the size that is expected of the compute buffers is that of before the growth",
        Edit(
            DYNAMIC, "backend_buf_exp_size[i] = ggml_backend_sched_get_buffer_size(sched.get(), backend_ptrs[i]);", ""
        ),
        Run("llama-dense", ("-fa", "off", "--fill", "1100", "--checks", "prompt", "-v"), COPY),
        "log: does not match expectation",
    ),
    Trap(
        "the time of the batch that grows is lost, because the context is synchronized and not its scheduler",
        Edit(DYNAMIC, "ggml_backend_sched_synchronize(lctx->get_sched());", "lctx->synchronize();"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "storage moves while a batch is still computed",
        Edit(
            DYNAMIC,
            "dyn->dyn->synchronize();",
            "",
            after="bool llama_kv_cache::try_resize(",
        ),
        Run("llama-dense", ("--quick", "--checks", "unread"), {**COPY, "KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "memory goes back while a batch is still computed",
        Edit(INPLACE, "dyn->dyn->synchronize();", "", after="void llama_kv_cache::dyn_release_blocks()"),
        Run("llama-dense", ("--fill", "1100", "--checks", "unread"), {"KV_WATCH": "1"}),
        "unread",
    ),
    Trap(
        "growth while generating is forgotten: the cell behind the storage is the first that does not ask",
        Edit(DYNAMIC, "res = std::max(res, idx + 1);", "res = std::max(res, idx);"),
        copies("llama-dense", "generate"),
        "generate",
    ),
    Trap(
        "in place, cells that were given out have no pages, and nobody counts them",
        Edit(DYNAMIC, "dyn->want(sinfo.strm[s], idx, idx + 1);", ""),
        inplace("llama-dense", "prompt"),
        "status: same-not-grown",
    ),
    Trap(
        "training asks for cells where nothing can grow",
        Edit(CONTEXT, "!kv_dynamic->grow_max()", "false"),
        copies("llama-dense", "train", "--train", "-fa", "off", "-ctk", "f32", "-ctv", "f32"),
        "train",
    ),
    Trap(
        "a plan that was made before the growth is used after it",
        Edit(CONTEXT, "mctx->get_status() == LLAMA_MEMORY_STATUS_FAILED_PREPARE", "false", after="kv_dynamic_grow()"),
        copies("deepseek4-moe", "prompt"),
        "prompt",
    ),
)

NO_GRAPH_IS_DROPPED = Edit(CONTEXT, "kv_dynamic->moved()", "false")

STALE = (
    Trap(
        "a graph that was built before a growth runs again, on freed tensors",
        (NO_GRAPH_IS_DROPPED, Edit(DYNAMIC, "is_resized = true;", "", after="void llama_kv_dynamic::set_moved()")),
        copies("llama-dense", "state-self"),
        "state-self",
    ),
    Trap(
        "a draft that shares cells is not told that they moved, and runs its old graph again",
        (NO_GRAPH_IS_DROPPED, Edit(DYNAMIC, "readers.push_back(reader);", "")),
        copies(DRAFT, "draft"),
        "draft",
    ),
)

ROWS = (
    Trap(
        "the indexer of a hybrid model adopts cells that its own cache has no storage for",
        Edit("src/llama-memory-hybrid-idx.cpp", "mem_idx->dyn_request(heads_idx);", ""),
        copies("qwen4exp-moe", "prompt"),
        "prompt",
    ),
    Trap(
        "the compressed caches of DSV4 are written beyond their storage",
        Edit(DYNAMIC, "res = kv->dyn_request_rows((pos_max + 1)/ratio) && res;", ""),
        copies("deepseek4-moe", "prompt", "--fill", "1100"),
        "prompt",
    ),
    Trap(
        "the rows of DSV4 have no cells, and a growth copies none of them",
        Edit(
            DYNAMIC,
            "dyn->has_rows ? std::min(dyn->n_rows_used, dyn_n_rows(dyn->n_cells)) : v_cells[s].used_max_p1()",
            "v_cells[s].used_max_p1()",
        ),
        copies("deepseek4-moe", "prompt", "--fill", "1100", "-c", "8192"),
        "prompt",
    ),
    Trap(
        "the scratch row of DSV4 lies inside the attention window",
        Edit(DYNAMIC, "GGML_PAD(n_rows, 256u) + 1", "GGML_PAD(n_rows, 256u)"),
        copies("deepseek4-moe", "prompt", "--fill", "1100"),
        "prompt",
    ),
)

CELLS = (
    Trap(
        "the cells start small with the storage, and tokens get other cells than in the static cache",
        Edit(
            CACHE,
            "v_cells[s].resize(kv_size);",
            f"v_cells[s].resize({DYNAMIC_CONTEXT} ? 256 : kv_size);",
        ),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
    Trap(
        "a window cache of full size starts small, overwrites masked cells and loses history",
        Edit(
            CACHE,
            "v_cells[s].resize(kv_size);",
            f"v_cells[s].resize({DYNAMIC_CONTEXT} && n_swa > 0 ? 256 : kv_size);",
        ),
        copies("gemma3-dense", "prompt", "--swa-full"),
        "prompt",
    ),
    *(
        Trap(
            f"context shift comes and goes with the size that the caches of {name} happen to have",
            (
                Edit(file, f"{a}->get_size_max() == {b}->get_size_max()", f"{a}->get_size() == {b}->get_size()"),
                # after a growth that fell short, caches that mirror each other are given one size again
                *((NO_EVEN_OUT,) if sees == "no-memory" else ()),
            ),
            run,
            sees,
        )
        for name, file, a, b, run, sees in (
            ("iSWA", "src/llama-kv-cache-iswa.cpp", "kv_base", "kv_swa", copies("gemma3-dense", "shift"), "shift"),
            ("DSA", "src/llama-kv-cache-dsa.cpp", "kv_mla", "kv_lid", half_failed("deepseek32-moe"), "no-memory"),
            (
                "DSA-iSWA",
                "src/llama-kv-cache-dsa-iswa.cpp",
                "kv_dsa->get_mla()",
                "kv_swa",
                copies("dots3note-moe", "shift"),
                "shift",
            ),
            ("MSA", "src/llama-kv-cache-msa.cpp", "kv_base", "kv_idx", half_failed("minimax-m3-moe"), "no-memory"),
        )
    ),
)

STATE = (
    Trap(
        "rows of a state that was read into one stream are written after the growth for the next stream moved them",
        Edit(DYNAMIC, "io.flush();", ""),
        copies("llama-dense", "state-self", "--seqs", "4", "-fa", "off"),
        "state-self",
    ),
    Trap(
        "what a pending copy of a stream reads is lost, because its cells are free when a state makes the cache grow",
        Edit(DYNAMIC, "res[sc_info.ssrc[i]] = std::max(res[sc_info.ssrc[i]], res[sc_info.sdst[i]]);", ""),
        copies("llama-dense", "state-seq", "--seqs", "3"),
        "state-seq",
    ),
    Trap(
        "a state that was kept on the device is not found again, because the buffers have another type after a growth",
        (
            Edit(INPLACE, "buft == ggml_backend_cpu_buffer_type()", "false"),
            Edit(STORAGE, "l.has_pages", "true", after="std::unique_ptr<llama_kv_pages> pages;"),
        ),
        copies("llama-dense", "state-device"),
        "state-device",
    ),
    Trap(
        "a state that is larger than the storage is refused instead of making it grow",
        Edit(DYNAMIC, "!try_resize(n_cells)", "true"),
        copies("llama-dense", "state-into-dynamic"),
        "state-into-dynamic",
    ),
    Trap(
        "a state that was saved on the device is taken for a view of the tensor that now has its address",
        Edit(CONTEXT, "org0->data != org1->data || org0->buffer != org1->view_src->buffer", "false"),
        copies("llama-dense", "state-device"),
        "state-device",
    ),
    Trap(
        "a saved state has the stride of the full size, not that of the storage",
        Edit(CACHE, "get_size()", "get_size_max()", after="// When v is transposed, we also need the element size"),
        copies("llama-dense", "state-into-static", "-fa", "off"),
        "state-into-static",
    ),
)

STRIDES = (
    *(
        Trap(
            f"{what} has the stride of the full size, not that of the storage",
            Edit(CACHE, "get_size()", "get_size_max()", after=after),
            copies("llama-dense", check, *args),
            check,
        )
        for what, after, check, args in (
            ("the K that attention reads", "::get_k(ggml_context", "prompt", ("--seqs", "4")),
            ("the transposed V that attention reads", "::get_v(ggml_context", "prompt", ("-fa", "off")),
            ("the K that a batch writes", "::cpy_k(ggml_context", "prompt", ("--seqs", "4")),
            ("the V that a batch writes", "::cpy_v(ggml_context", "prompt", ("--seqs", "4")),
            ("the row of K that a token gets", "::set_input_k_idxs(", "prompt", ("--seqs", "4")),
            ("the row of V that a token gets", "::set_input_v_idxs(", "prompt", ("--seqs", "4")),
            (
                "the element of transposed V that a token gets",
                "// note: the V cache is transposed",
                "prompt",
                ("-fa", "off"),
            ),
        )
    ),
    Trap(
        "the worst case is reserved for the full size, over tensors that are smaller",
        Edit(CACHE, "kv->get_size()", "kv->get_size_max()", after="status(LLAMA_MEMORY_STATUS_SUCCESS), kv(kv)"),
        copies("llama-dense", "prompt"),
        "prompt",
    ),
)

COPYING = (
    Trap(
        "a growth leaves the blocks of transposed V at their old stride",
        Edit(
            STORAGE,
            "b.offset(s, i, n_dst)",
            "b.offset(s, i, n_src)",
            after="if (ggml_backend_buffer_is_host(src->buffer)",
        ),
        copies("llama-dense", "prompt", "-fa", "off"),
        "prompt",
    ),
    Trap(
        "a growth leaves the streams of K at their old stride",
        Edit(
            STORAGE,
            "b.offset(s, i, n_dst)",
            "b.offset(s, i, n_src)",
            after="if (ggml_backend_buffer_is_host(src->buffer)",
        ),
        copies("llama-dense", "prompt", "--seqs", "4"),
        "prompt",
    ),
    Trap(
        "on a device, a growth leaves transposed V at its old stride",
        Edit(STORAGE, "b.offset(s, i, n_dst)", "b.offset(s, i, n_src)", after="memcpy(data_dst.data()"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "on a device, a growth leaves the streams of K at their old stride",
        Edit(STORAGE, "b.offset(s, 0, n_dst)", "b.offset(s, 0, n_src)", after="ggml_tensor * view_dst"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "the last live cell is not copied",
        Edit(STORAGE, "std::min(n_used.at(s), n_cells)", "std::max(1u, std::min(n_used.at(s), n_cells)) - 1"),
        copies("qwen35-dense", "generate"),
        "generate",
    ),
    Trap(
        "new rows are not zero, and garbage in V becomes NaN through the mask",
        Edit(STORAGE, "ggml_backend_buffer_clear(buf.get(), 0);", "ggml_backend_buffer_clear(buf.get(), 0xff);"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "the views of the streams point into the layout of before",
        Edit(STORAGE, "view->view_offs = s*t->nb[2];", "view->view_offs = s*t->nb[2]/2;"),
        copies("llama-dense", "copy", "--seqs", "4"),
        "copy",
    ),
    Trap(
        "a layer on a device moves to host memory",
        Edit(
            STORAGE,
            "ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), l.buft)",
            "ggml_backend_alloc_ctx_tensors_from_buft(ctx.get(), ggml_backend_cpu_buffer_type())",
        ),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "steps of a fixed size: the bytes that are copied grow with the square of the context",
        Edit(GROWTH, "n_cur < LLAMA_KV_GROWTH_DOUBLE_MAX", "false", after="::next("),
        unit("test-kv-growth"),
        "exit",
    ),
)

NO_MEMORY = (
    Trap(
        "a growth that fails half way leaves layers of two sizes",
        Edit(STORAGE, "undo_layer(layers[j], n_cells_cur, n_used);", ""),
        copies("llama-dense", "no-memory", "--fail", "2+", "-fa", "off"),
        "no-memory",
    ),
    Trap(
        "a growth that fails half way keeps the memory that it had got",
        Edit(STORAGE, "!move_layer(layers[j], n_cells_cur, n_used)", "true"),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "rows behind the live cells are not zero after a growth that failed",
        Edit(STORAGE, "set_zero(t, offs_dst + size_live, size_full - size_live);", ""),
        unit("test-kv-storage"),
        "exit",
    ),
    Trap(
        "an exception leaves llama_decode() when the compute buffers cannot be had",
        Edit(DYNAMIC, 'LLAMA_LOG_WARN("%s: %s\\n", __func__, err.what());', "throw;"),
        Run(
            "llama-dense", ("--quick", "--checks", "no-memory", "--fail", "1000000"), {**COPY, "KV_WATCH": "no-reserve"}
        ),
        "no-memory",
    ),
    Trap(
        "--fit measures the small start, accepts too large a context and runs out of memory later",
        Edit(DYNAMIC, "hparams.no_alloc", "false"),
        Run("llama-dense", ("--memory", "--no-alloc", "--kv-dynamic", "on", "-c", "4096", "-v")),
        "log: dynamic KV cache: start",
    ),
)

IN_PLACE = (
    Trap(
        "in place, a sequence that is copied to another stream has no pages there",
        Edit(INPLACE, "!dyn->inplace->copy_stream(ssrc, sdst)", "false"),
        inplace("llama-dense", "copy", "--seqs", "2"),
        "copy",
    ),
    Trap(
        "in place, a shift goes over the rows of the first stream only",
        Edit(
            CACHE,
            "ggml_row_size(layer.k->type, n_embd_nope) + dyn_rows.first*layer.k->nb[1]",
            "ggml_row_size(layer.k->type, n_embd_nope)",
        ),
        inplace("llama-dense", "shift", "--seqs", "4"),
        "shift",
    ),
    Trap(
        "in place, cells in use are given back",
        Edit(INPLACE, "!v_cells[s].is_empty(i)", "i < 1"),
        Run("llama-dense", ("--checks", "shrink")),
        "shrink",
    ),
)

TRAPS = (*GROWING, *STALE, *ROWS, *CELLS, *STATE, *STRIDES, *COPYING, *NO_MEMORY, *IN_PLACE)


@dataclass(frozen=True)
class Impossible:
    """A trap that the design excludes. why: what excludes it; absent: what no line of cpp/src may have for that."""

    name: str
    why: str
    absent: tuple[str, ...] = ()


IMPOSSIBLE = (
    Impossible(
        "the cells are wiped, or marked as occupied, when they are resized",
        "the cells have their full size from the start and are never resized",
        ("cells.resize", "].resize(kv_size", "pos.resize"),
    ),
    Impossible(
        "a second cache is built through a constructor whose filters capture locals that are gone",
        "the tensor objects stay, only their buffers change",
        ("new llama_kv_cache", "make_unique<llama_kv_cache>", "make_unique<llama_kv_cache_iswa>"),
    ),
    Impossible(
        "an ordinary growth is logged as an error, because find_slot() found no cell",
        "find_slot() looks at the cells, which are all there",
        ("find_slot(", "FAILED_COMPUTE"),
    ),
    Impossible(
        "a cache that grows gets another type, and with it another rotation",
        "a growth allocates with the type of the tensor that it moves",
        ("GGML_TYPE_F16", "attn_rot"),
    ),
)
