"""Measure a static cache and both kinds of dynamic caches (`kvtool bench`)."""
