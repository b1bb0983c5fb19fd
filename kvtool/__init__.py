"""Build and prove llama.cpp with a patch series, and move the series to new upstream tags: the program `kvtool`."""

__version__ = "0.1.0"
