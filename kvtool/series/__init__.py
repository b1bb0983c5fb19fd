"""Text: patch files, C source, the placement of hunks, series.toml. Imports nothing that runs git."""
