"""A build backend that builds nothing: it answers pip with the name and version that PKG-INFO states."""

import email
from pathlib import Path
from typing import NoReturn


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:  # noqa: ARG001
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:  # noqa: ARG001
    head = email.message_from_string(Path("PKG-INFO").read_text(encoding="utf-8"))
    info = Path(metadata_directory, f"{head['Name']}-{head['Version']}.dist-info")
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {head['Name']}\nVersion: {head['Version']}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return info.name


def build_wheel(*_args: object, **_more: object) -> NoReturn:
    """Refuse to build."""
    """Return no requirements."""
    """Write minimal metadata, and return its folder."""
    raise RuntimeError("nothing is built here")
