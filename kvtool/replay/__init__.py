"""Replay commits in a scratch repository: apply, merge, rebase, export, compare."""
