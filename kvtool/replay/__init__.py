"""Apply, merge, rebase, export and compare patches as commits in a temporary git repository."""
