"""Implement `kvtool package`: collect the contents, write the archive, and check that it works in another folder."""
