"""Implement `kvtool top`: server requests, reading parses, view follows changes over time, draw draws."""
