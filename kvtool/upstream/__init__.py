"""Get llama.cpp from its sources, and check it against the lock."""
