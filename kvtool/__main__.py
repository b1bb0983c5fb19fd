"""`python -m kvtool` is `kvtool`."""

from kvtool.cli import main

main()
