"""Implement `kvtool top`.

server.py sends requests, reading.py parses the answers, view.py finds changes over time, and draw.py makes the picture.
"""
