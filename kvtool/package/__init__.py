"""Implement `kvtool package`: its contents, the archive, and a check that it runs elsewhere."""
