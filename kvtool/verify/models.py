"""Make the models for verify: upstream's toys, toys with a real tokenizer, and a real cache geometry.

All weights are random and deterministic: the same binaries and seeds produce the same files.

- toys: `test-llama-archs -o DIR` of the tested tree writes one or two models per architecture (127 at v0.5.0, about
  880 MiB). They are kept until the binaries change.
- text models: a toy whose token embeddings are widened to a vocabulary file of upstream's tree, so that it reads and
  writes text. The geometry is the toy's, so this works for every architecture and upstream, without a list of
  parameters here. The weights are drawn again: the toys' own are so small (norms around 0, scales around 0.05) that
  attention hardly affects the output, and a text that ignores its prompt proves nothing.
- cache geometry: the attention layers of a large model (count, KV heads, head size), everything else tiny. To compare
  the cost of a cache with the rest of a call, the whole geometry of a small model.
"""

import hashlib
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvtool import process
from kvtool.errors import VerifyError
from kvtool.project import Project

TOY_SEED = 1  # test-llama-archs draws a random seed by default
VOCABULARY = "ggml-vocab-llama-spm.gguf"  # 32000 tokens, 0.7 MB, the smallest real one, in every tree since 2024
_MAKING_SECONDS = 3600.0
CONTEXT = 8192  # n_ctx_train of a spoken model: the server caps its slots there


class Geometry(NamedTuple):
    """Hold the numbers that decide the bytes of a KV cache, and the rest of a model's geometry.

    layers, kv_heads, head_size: attention layers, KV heads, elements per head
    heads: attention heads (0: as many as KV heads)
    embd, ffn, vocab: lengths of a token's embedding and of a feed-forward layer, words of the vocabulary
    """

    name: str
    layers: int
    kv_heads: int
    head_size: int
    heads: int = 0
    embd: int = 64
    ffn: int = 64
    vocab: int = 256

    def bytes_per_cell(self) -> int:
        """K and V of one token over all layers, in f16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


QWEN35_27B = Geometry("Qwen3.5-27B", layers=16, kv_heads=4, head_size=256)
# all of it: of the models that are in use one of the smallest, so what its cache costs weighs most
SMOLLM2_135M = Geometry("SmolLM2-135M", 30, 3, 64, heads=9, embd=576, ffn=1536, vocab=49152)


def workplace(project: Project, name: str, *, applied: bool) -> Path:
    """Return the folder for a command's models and logs, which its next run finds again.

    It is in the build directory of the applied tree. With --bin, it is in the user's cache: `kvtool apply` refuses a
    non-empty tree, and DIR may be read-only.
    """
    work = (project.tree / "build" if applied else project.cache) / name
    work.mkdir(parents=True, exist_ok=True)
    return work


def fingerprint(paths: Sequence[Path], *extra: str) -> str:
    """Return 12 hex digits of a hash over the files and the extra words; a missing file counts as empty."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update("\0".join(extra).encode())
    return digest.hexdigest()[:12]


def programs(binary: Path) -> list[Path]:
    """Return the binary and the llama and ggml libraries next to it, each once (links are followed)."""
    known = ("libllama.", "libggml", "llama.dll", "ggml")
    beside = [p for p in binary.parent.iterdir() if p.name.startswith(known)]
    return sorted({p.resolve() for p in [binary, *beside] if p.is_file()})


def toys(generator: Path, work: Path, on_progress: Callable[[int], None] = lambda _made: None) -> tuple[Path, ...]:
    """Return upstream's toy models by name; generate them under `work` unless these binaries already did.

    An older generation is removed, because each needs almost a GiB. on_progress receives the number of models so far.
    Raises VerifyError if the generator fails or writes nothing.
    """
    home = work / f"toys-{fingerprint(programs(generator), str(TOY_SEED))}"
    if not home.is_dir():
        work.mkdir(parents=True, exist_ok=True)
        # also the unfinished work of a killed run; another process may still write a younger folder
        killed = (made for made in work.glob("making-*") if time.time() - made.stat().st_mtime > _MAKING_SECONDS)
        for stale in (*work.glob("toys-*"), *killed):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=work, prefix="making-") as making:
            out = Path(making) / "toys"
            out.mkdir()
            _generate(generator, out, on_progress)
            try:
                out.rename(home)  # so a half-written folder never has that name
            except OSError:  # not empty: another run was faster
                if not home.is_dir():
                    raise
    return tuple(sorted(home.glob("*.gguf")))


def _generate(generator: Path, out: Path, on_progress: Callable[[int], None]) -> None:
    argv: list[str | Path] = [generator, "-s", str(TOY_SEED), "-o", out]
    done = process.stream(argv, on_line=lambda _line: on_progress(len(list(out.glob("*.gguf")))))
    if done.returncode != 0 or not any(out.glob("*.gguf")):
        raise VerifyError(
            "the toy models could not be generated",
            why=f"{generator.name} ended with exit code {done.returncode}",
            next_step=f"run it by hand: {process.quote(argv)}",
            output=done.stdout[-2000:],
        )


def text_model(toy: Path, vocabulary: Path, work: Path, seed: int = 1) -> Path:
    """Return a copy of the toy with the vocabulary's tokens and weights from the seed; cached by content.

    Raises VerifyError if a file is invalid.
    """
    out = work / f"spoken-{toy.stem}-{fingerprint([toy, vocabulary, Path(__file__)], str(seed))}.gguf"
    if not out.is_file():
        for stale in set(work.glob(f"spoken-{toy.stem}-????????????.gguf")) - {out}:  # another process may be making it
            stale.unlink(missing_ok=True)
    return cached_model(out, lambda path: _graft(toy, vocabulary, path, seed))


def cached_model(out: Path, write: Callable[[Path], None]) -> Path:
    """Let `write` make the file under another name, then rename: a killed run leaves nothing that looks finished."""
    if out.is_file():
        return out
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(f".{os.getpid()}.part")
    try:
        write(partial)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)
    return out


def read_model(path: Path) -> Any:
    """Return a GGUFReader. Raises VerifyError if the file is not a GGUF file."""
    from gguf import GGUFReader  # its import of numpy costs 0.1 s, so only verify imports it

    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError) as err:
        raise VerifyError(f"{path.name} is not a readable GGUF file", why=str(err), next_step=f"remove {path}") from err


def copy_keys(reader: Any, writer: Any, keep: Callable[[str], bool]) -> None:
    """Copy the keys that `keep` accepts from a GGUFReader to a GGUFWriter, except the keys of the format itself."""
    from gguf import GGUFValueType

    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or not keep(name):
            continue
        value = field.contents() if field.data else None
        if field.types[0] != GGUFValueType.ARRAY:
            writer.add_key_value(name, value, field.types[0])
        elif value:  # the writer has no way to write an empty array, and none of upstream's readers misses one
            writer.add_key_value(name, value, GGUFValueType.ARRAY, field.types[1])


def _graft(toy: Path, vocabulary: Path, out: Path, seed: int) -> None:
    from gguf import GGUFWriter

    body, words = read_model(toy), read_model(vocabulary)
    try:
        arch = body.fields["general.architecture"].contents()
        n_vocab = len(words.fields["tokenizer.ggml.tokens"].contents())
    except KeyError as err:
        raise VerifyError(f"{toy.name} or {vocabulary.name} lacks the key {err}") from err
    writer = GGUFWriter(out, arch)
    resized = {f"{arch}.context_length": CONTEXT, f"{arch}.vocab_size": n_vocab}
    copy_keys(body, writer, lambda name: not name.startswith("tokenizer.") and name not in resized)
    copy_keys(words, writer, lambda name: name.startswith("tokenizer."))
    for name, number in resized.items():
        writer.add_uint32(name, number)
    for tensor in body.tensors:
        if not tensor.name.endswith((".scale", ".input_scale")):  # optional, and they weaken attention
            writer.add_tensor(tensor.name, _weights(tensor, n_vocab, seed))
    seal(writer)


def _weights(tensor: Any, n_vocab: int, seed: int) -> Any:
    """Random weights for one tensor, scaled so that a signal keeps its size from layer to layer.

    The random numbers depend only on the name, so that a new tensor of upstream does not change the others. Queries and
    keys get a gain, which makes attention pick a few positions instead of averaging over all.
    """
    import numpy as np

    name: str = tensor.name
    shape = [int(n) for n in tensor.shape][::-1]  # gguf's order is fastest first, numpy's last
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name in ("token_embd.weight", "output.weight"):
        drawn = rng.standard_normal((n_vocab, shape[1]), dtype=np.float32)
        if name == "token_embd.weight":
            return drawn.astype(np.float16)  # only looked up, so half the size costs nothing
        # 32 bits: with f16 weights the activations are rounded to f16 as well, and that rounding turns the last bits
        # in which two batch sizes differ into changed texts.
        return drawn * np.float32(8 / np.sqrt(shape[1]))
    if "norm" in name and name.endswith(".weight"):
        centre = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        return (centre + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    if len(shape) < 2:  # biases, and state-space vectors whose sign matters
        return np.array(tensor.data)
    gain = 2.0 if "attn_q" in name or "attn_k" in name else 1.0
    drawn = gain / np.sqrt(shape[-1]) * rng.standard_normal(shape, dtype=np.float32)
    return drawn.astype(tensor.data.dtype)


def random_weight(name: str, shape: tuple[int, ...]) -> Any:
    """Random numbers for the tensor of this name: 1 and a little for a vector, else what keeps a signal's size."""
    import numpy as np

    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    return drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else 1 + np.float32(0.1) * drawn


def attention_keys(geometry: Geometry, context: int) -> dict[str, Any]:
    """Return the keys that all models of this module have."""
    return {
        "block_count": geometry.layers,
        "context_length": context,
        "embedding_length": geometry.embd,
        "feed_forward_length": geometry.ffn,
        "vocab_size": geometry.vocab,
        "attention.head_count": geometry.heads or geometry.kv_heads,
        "attention.head_count_kv": geometry.kv_heads,
        "attention.key_length": geometry.head_size,
        "attention.value_length": geometry.head_size,
        "attention.layer_norm_rms_epsilon": 1e-6,
    }


def write_model(
    out: Path, arch: str, keys: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], *, half: bool = False
) -> Path:
    """Write a model without a tokenizer once, and return it.

    keys: those of its architecture
    shapes: of its tensors, rows first
    half: matrices in f16
    """
    from gguf import GGUFValueType as Kind
    from gguf import GGUFWriter

    def write(path: Path) -> None:
        writer = GGUFWriter(path, arch)
        writer.add_name(f"random weights, {arch}")
        writer.add_tokenizer_model("no_vocab")
        kinds = {bool: Kind.BOOL, str: Kind.STRING, float: Kind.FLOAT32, int: Kind.UINT32, list: Kind.ARRAY}
        for name, value in keys.items():
            writer.add_key_value(f"{arch}.{name}", value, kinds[type(value)])
        for name, shape in shapes.items():
            weight = random_weight(name, shape)
            writer.add_tensor(name, weight.astype("float16") if half and len(shape) > 1 else weight)
        seal(writer)

    return cached_model(out, write)


def cache_model(geometry: Geometry, work: Path, context: int = 262144) -> Path:
    """Return a model with this geometry (about 10 MB for Qwen3.5-27B's cache alone); cached by name."""
    g = geometry
    size = f"-{g.embd}x{g.ffn}x{g.vocab}" if g.heads else ""
    q, kv = (g.heads or g.kv_heads) * g.head_size, g.kv_heads * g.head_size
    keys = {**attention_keys(g, context), "rope.dimension_count": g.head_size}
    layer = {"attn_norm": (g.embd,), "attn_q": (q, g.embd), "attn_k": (kv, g.embd), "attn_v": (kv, g.embd)}
    layer |= {"attn_output": (g.embd, q), "ffn_norm": (g.embd,), "ffn_gate": (g.ffn, g.embd)}
    layer |= {"ffn_up": (g.ffn, g.embd), "ffn_down": (g.embd, g.ffn)}
    shapes = {"token_embd": (g.vocab, g.embd), "output_norm": (g.embd,), "output": (g.vocab, g.embd)}
    shapes |= {f"blk.{il}.{name}": shape for il in range(g.layers) for name, shape in layer.items()}
    named = {f"{name}.weight": shape for name, shape in shapes.items()}
    out = work / f"cache-{g.layers}x{g.kv_heads}x{g.head_size}{size}-{context}.gguf"
    return write_model(out, "llama", keys, named, half=True)


def seal(writer: Any) -> None:
    """Write everything that a GGUFWriter was given, and close its file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
