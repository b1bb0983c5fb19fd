"""Replace the build program of a package: give pip the name and the version from PKG-INFO, and build nothing."""

import email
from pathlib import Path
from typing import NoReturn


def get_requires_for_build_wheel(config_settings: object = None) -> list[str]:  # noqa: ARG001
    """Return no requirements."""
    return []


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: object = None) -> str:  # noqa: ARG001
    """Write only the name and the version as metadata, and return the name of the folder."""
    head = email.message_from_string(Path("PKG-INFO").read_text(encoding="utf-8"))
    info = Path(metadata_directory, f"{head['Name']}-{head['Version']}.dist-info")
    info.mkdir()
    text = f"Metadata-Version: 2.1\nName: {head['Name']}\nVersion: {head['Version']}\n"
    (info / "METADATA").write_text(text, encoding="utf-8")
    return info.name


def build_wheel(*_args: object, **_more: object) -> NoReturn:
    """Refuse to build."""
    raise RuntimeError("nothing is built here")
