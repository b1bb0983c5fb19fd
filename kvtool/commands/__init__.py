"""One verb per module; the scheme is described at the top of kvtool/cli.py."""
