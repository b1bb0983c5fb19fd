"""Implement the commands of kvtool, one module each. The head of kvtool/cli.py describes how a command is found."""
