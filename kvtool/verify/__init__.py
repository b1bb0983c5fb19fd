"""Prove the built programs: static against dynamic."""
