"""Prove that the built programs give the same results with a static and with a dynamic cache."""
