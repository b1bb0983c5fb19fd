"""Run kvtool with `python -m kvtool`."""

from kvtool.cli import main

main()
