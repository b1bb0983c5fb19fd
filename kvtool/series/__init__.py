"""Read and check texts: patch files, C source, places of hunks, series.toml. No module here runs git."""
