"""Read the header of a GGUF file, and find out whether the file is complete. The model is not loaded.

gguf.GGUFReader is not used, because it also reads the tensors and needs seconds for a vocabulary of 256000 words. The
reader here skips both.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from kvtool.errors import UsageError

# kinds 0 to 7 of a value are numbers, 8 is a string, 9 is an array
_SCALARS: Mapping[int, str] = dict(enumerate("BbHhIif?"))
_SCALARS = {**_SCALARS, 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_KEYS = 1 << 20
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class Header:
    """Hold what kvtool needs of a model's header."""

    arch: str
    name: str  # "" if the file has none
    context: int  # tokens that the model was trained for, 0 if unknown
    n_bytes: int  # bytes of all files of the model together


def read_header(path: Path) -> Header:
    """Return the header of a model. Raise UsageError if a file is missing, truncated or not a GGUF file."""
    files = _files(path)
    headers = [_read_file(file) for file in files]
    keys = headers[0]
    arch = str(keys.get("general.architecture", ""))
    if not arch:
        raise UsageError(f"{path} is not a model", why="its header names no architecture")
    context = keys.get(f"{arch}.context_length", 0)
    size = sum(file.stat().st_size for file in files)
    return Header(arch, str(keys.get("general.name", "")), int(context), size)


def _files(path: Path) -> list[Path]:
    """Return all files of the model that `path` belongs to. The files of a split model are in numerical order."""
    if not path.is_file():
        why = "it is a directory" if path.is_dir() else "the file does not exist"
        raise UsageError(f"there is no model {path}", why=why, next_step="name a GGUF file, or a model of kvtool fetch")
    found = _SHARD.search(path.name)
    if not found:
        return [path]
    count = int(found[2])
    names = [f"{path.name[: found.start()]}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1)]
    if missing := [name for name in names if not (path.parent / name).is_file()]:
        raise UsageError(f"{path.name} is one of {count} files, and {missing[0]} is missing")
    return [path.parent / name for name in names]


def _read_file(path: Path) -> dict[str, Any]:
    """Return the keys of one file and their values, without arrays. Raise UsageError if the file is not complete."""
    size = path.stat().st_size
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise UsageError(f"{path} is not a GGUF file", why="it does not begin with the letters GGUF")
            version, tensors, count = _unpack(file, "IQQ")
            if not 2 <= version <= 3 or count > _MOST_KEYS or tensors > _MOST_KEYS:
                raise UsageError(f"{path} is not a readable GGUF file", why=f"its version is {version}")
            keys = dict(_key(file) for _ in range(count))
            ends = [_tensor_end(file) for _ in range(tensors)]
            alignment = int(keys.get("general.alignment", 32))
            start = -(-file.tell() // alignment) * alignment
    except (struct.error, EOFError, UnicodeDecodeError, OverflowError) as err:
        raise _truncated(path, "it ends within its header") from err
    except OSError as err:
        raise UsageError(f"cannot read {path}", why=str(err)) from err
    needed = start + max(ends, default=0)
    if size < needed:
        raise _truncated(path, f"it has {size} bytes, and its tensors need {needed}")
    return keys


def _truncated(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is truncated", why=why, next_step="download it again")


def _unpack(file: IO[bytes], form: str) -> tuple[Any, ...]:
    form = "<" + form
    return struct.unpack(form, file.read(struct.calcsize(form)))


def _string(file: IO[bytes]) -> str:
    (length,) = _unpack(file, "Q")
    data = file.read(length) if length < 1 << 30 else b""
    if len(data) != length:
        raise EOFError
    return data.decode("utf-8", "replace")


def _key(file: IO[bytes]) -> tuple[str, Any]:
    name = _string(file)
    (kind,) = _unpack(file, "I")
    return name, _value(file, kind)


def _value(file: IO[bytes], kind: int) -> Any:
    """Return a number or a text. For an array, skip it and return None."""
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        if kind not in _SCALARS:
            raise EOFError
        return _unpack(file, _SCALARS[kind])[0]
    inner, count = _unpack(file, "IQ")
    if inner == _STRING:
        for _ in range(count):
            (length,) = _unpack(file, "Q")
            file.seek(length, 1)
    elif inner in _SCALARS:
        file.seek(count * struct.calcsize("<" + _SCALARS[inner]), 1)
    else:
        for _ in range(count):
            _value(file, inner)
    return None


def _tensor_end(file: IO[bytes]) -> int:
    """Read the description of one tensor. Return where its data ends, in bytes after the start of the data section."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    _string(file)
    (dims,) = _unpack(file, "I")
    elements = 1
    for extent in _unpack(file, "Q" * dims):
        elements *= extent
    kind, offset = _unpack(file, "IQ")
    try:
        block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    # the package gguf does not know the type yet, so count no bytes for the tensor itself
    except (ValueError, KeyError):
        return int(offset)
    return int(offset) + elements // block * block_bytes
