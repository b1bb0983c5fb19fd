"""Implement `kvtool top`.

server.py sends requests to llama-server, and reading.py parses the answers. view.py compares the answers over time,
for example to compute speeds. draw.py formats the lines that the terminal shows.
"""
