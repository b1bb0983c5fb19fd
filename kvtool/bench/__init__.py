"""Measure a static cache, a dynamic cache that grows by copy, and one that grows in place (`kvtool bench`)."""
