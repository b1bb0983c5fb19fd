"""Configure and compile the patched tree."""
