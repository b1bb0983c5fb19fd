"""Change the checkout of a patched tree: status, checkout, rebase sessions, transactions."""
