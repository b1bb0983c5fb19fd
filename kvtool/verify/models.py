"""Make the test models of `kvtool verify`. All weights are random.

The same binaries and seeds always produce the same files. There are three kinds:

- toys: `test-llama-archs -o DIR` of the tested tree writes one or two tiny models for each architecture (127 toys at
  v0.5.0, about 880 MiB). The toys are kept until the binaries change.
- text models: copies of toys that can read and write text. The token embeddings of a copy are widened to the size of a
  vocabulary file of upstream's tree. The other dimensions of the toy stay. So kvtool needs no list of parameters, and
  can make a text model for every architecture and upstream tag. New random weights are drawn, because the toy's own
  weights are too small (norms around 0, scales around 0.05). With such small weights, attention hardly affects the
  output, and a text that does not depend on its prompt proves nothing.
- cache models: models whose cache is as large as the cache of a large model (number of attention layers, KV heads, head
  size). All other dimensions are tiny. Some measurements compare the time for the cache with the time for the rest of a
  call. They use a model with all dimensions of a small real model instead.
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

TOY_SEED = 1  # used instead of the random seed that test-llama-archs would draw
VOCABULARY = "ggml-vocab-llama-spm.gguf"  # the smallest real vocabulary, in every tree since 2024: 32000 tokens, 0.7 MB
_MAKING_SECONDS = 3600.0
CONTEXT = 8192  # n_ctx_train of a text model; llama-server limits its slots to it


class Geometry(NamedTuple):
    """Hold the dimensions of a model. `layers`, `kv_heads` and `head_size` determine the size of its KV cache.

    layers: the number of layers with attention
    kv_heads: the number of KV heads
    head_size: the number of elements of a head
    heads: the number of attention heads; 0 means as many as KV heads
    embd: the length of a token's embedding
    ffn: the length of a feed-forward layer
    vocab: the number of words in the vocabulary
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
        """Return the bytes of K and V of one token in all layers, in f16."""
        return 2 * self.layers * self.kv_heads * self.head_size * 2


QWEN35_27B = Geometry("Qwen3.5-27B", layers=16, kv_heads=4, head_size=256)
# All dimensions of one of the smallest models in use. Its other calculations are cheap, so the cost of its cache is a
# large share.
SMOLLM2_135M = Geometry("SmolLM2-135M", 30, 3, 64, heads=9, embd=576, ffn=1536, vocab=49152)


def workplace(project: Project, name: str, *, applied: bool) -> Path:
    """Return the folder for the models and logs of a command. The next run of the command uses the same folder.

    If a patched tree exists (`applied`), the returned folder is in the tree's build directory. Otherwise the command
    tests the programs of --bin, and the returned folder is in the user's cache. A folder at the place of the tree would
    make `kvtool apply` fail, because `kvtool apply` refuses a folder that is not empty. The folder of --bin may be
    read-only.
    """
    work = (project.tree / "build" if applied else project.cache) / name
    work.mkdir(parents=True, exist_ok=True)
    return work


def fingerprint(paths: Sequence[Path], *extra: str) -> str:
    """Return 12 hex digits of a hash of the files and the extra words. A missing file counts as empty."""
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    digest.update("\0".join(extra).encode())
    return digest.hexdigest()[:12]


def programs(binary: Path) -> list[Path]:
    """Return the binary and the llama and ggml libraries next to it. A library with several links is returned once."""
    known = ("libllama.", "libggml", "llama.dll", "ggml")
    beside = [p for p in binary.parent.iterdir() if p.name.startswith(known)]
    return sorted({p.resolve() for p in [binary, *beside] if p.is_file()})


def toys(generator: Path, work: Path, on_progress: Callable[[int], None] = lambda _made: None) -> tuple[Path, ...]:
    """Return the paths of upstream's toy models, sorted by name.

    They are generated under `work`, unless the same binaries have generated them before. Toys of other binaries are
    removed, because they need almost a GiB.

    on_progress: called with the number of models written so far

    Raises VerifyError if the generator fails or writes nothing.
    """
    home = work / f"toys-{fingerprint(programs(generator), str(TOY_SEED))}"
    if not home.is_dir():
        work.mkdir(parents=True, exist_ok=True)
        # also remove what a killed run left; a newer folder may belong to a process that is still writing
        killed = (made for made in work.glob("making-*") if time.time() - made.stat().st_mtime > _MAKING_SECONDS)
        for stale in (*work.glob("toys-*"), *killed):
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=work, prefix="making-") as making:
            out = Path(making) / "toys"
            out.mkdir()
            _generate(generator, out, on_progress)
            try:
                out.rename(home)  # rename it last, so that a half-written folder never has the final name
            except OSError:  # the folder is not empty, because another process was faster
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
    """Return a copy of the toy with the tokens of the vocabulary and with weights drawn from the seed.

    The copy is kept, and made again only if the toy or the vocabulary changes. Raises VerifyError if a file is invalid.
    """
    out = work / f"spoken-{toy.stem}-{fingerprint([toy, vocabulary, Path(__file__)], str(seed))}.gguf"
    if not out.is_file():
        # do not delete `out` itself, because another process may be writing it
        for stale in set(work.glob(f"spoken-{toy.stem}-????????????.gguf")) - {out}:
            stale.unlink(missing_ok=True)
    return cached_model(out, lambda path: _graft(toy, vocabulary, path, seed))


def cached_model(out: Path, write: Callable[[Path], None]) -> Path:
    """Write a file under a temporary name, and rename it at the end. Return its path.

    So if kvtool is killed, no half-written file has the final name. An existing file is not written again.
    """
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
    """Return a GGUFReader of the file. Raise VerifyError if it is not a GGUF file."""
    from gguf import GGUFReader  # its import of numpy costs 0.1 s, so only verify imports it

    try:
        return GGUFReader(path)
    except (OSError, ValueError, IndexError) as err:
        raise VerifyError(f"{path.name} is not a readable GGUF file", why=str(err), next_step=f"remove {path}") from err


def copy_keys(reader: Any, writer: Any, keep: Callable[[str], bool]) -> None:
    """Copy the keys that `keep` accepts from a GGUFReader to a GGUFWriter. The keys of the file format are left out."""
    from gguf import GGUFValueType

    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture" or not keep(name):
            continue
        value = field.contents() if field.data else None
        if field.types[0] != GGUFValueType.ARRAY:
            writer.add_key_value(name, value, field.types[0])
        elif value:  # the writer cannot write an empty array; no reader of upstream needs one
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
        # left out: these scales are optional, and they would weaken attention
        if not tensor.name.endswith((".scale", ".input_scale")):
            writer.add_tensor(tensor.name, _weights(tensor, n_vocab, seed))
    seal(writer)


def _weights(tensor: Any, n_vocab: int, seed: int) -> Any:
    """Return random weights for one tensor, scaled so that activations keep about the same size from layer to layer.

    The random numbers depend only on the seed and on the name and the shape of the tensor. So a new tensor of upstream
    does not change the weights of the existing tensors. The weights for queries and keys are larger than the other
    weights. So attention chooses a few positions instead of averaging over all positions.
    """
    import numpy as np

    name: str = tensor.name
    shape = [int(n) for n in tensor.shape][::-1]  # GGUF stores the fastest dimension first, numpy last
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    if name in ("token_embd.weight", "output.weight"):
        drawn = rng.standard_normal((n_vocab, shape[1]), dtype=np.float32)
        if name == "token_embd.weight":
            # store f16 instead of f32: rows of this tensor are only looked up, not multiplied
            return drawn.astype(np.float16)
        # Store output.weight as f32. With f16 weights, llama.cpp also rounds the activations to f16. The activations of
        # two batch sizes differ in their last bits, and the rounding to f16 would turn this difference into another
        # text.
        return drawn * np.float32(8 / np.sqrt(shape[1]))
    if "norm" in name and name.endswith(".weight"):
        centre = 2.0 if "q_norm" in name or "k_norm" in name else 1.0
        return (centre + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    if len(shape) < 2:  # copy biases, and vectors of state-space models, whose sign matters
        return np.array(tensor.data)
    gain = 2.0 if "attn_q" in name or "attn_k" in name else 1.0
    drawn = gain / np.sqrt(shape[-1]) * rng.standard_normal(shape, dtype=np.float32)
    return drawn.astype(tensor.data.dtype)


def random_weight(name: str, shape: tuple[int, ...]) -> Any:
    """Return random numbers for a tensor of this name and shape.

    A vector has numbers near 1. The numbers of a matrix are scaled, so that its output is about as large as its input.
    """
    import numpy as np

    drawn = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape, dtype=np.float32)
    return drawn / np.float32(shape[-1] ** 0.5) if len(shape) > 1 else 1 + np.float32(0.1) * drawn


def attention_keys(geometry: Geometry, context: int) -> dict[str, Any]:
    """Return the keys that all models made here have."""
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
    """Write a model without a tokenizer, unless it exists, and return its path.

    keys: the keys of its architecture
    shapes: the shapes of its tensors, with the rows first
    half: store matrices as f16
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
    """Return a model with these dimensions. It is made once for each name.

    A model with only the cache of Qwen3.5-27B has about 10 MB.
    """
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
    """Write everything that was added to a GGUFWriter, and close the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
