"""Prove that the built programs produce the same results with a static and with a dynamic cache."""
