"""Read and change the checkout of a patched tree: its state, updates, rebases and transactions."""
