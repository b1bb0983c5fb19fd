"""kvtool carries a patch set over llama.cpp: fetch, apply, build, verify, export."""

__version__ = "0.1.0"
