"""Where llama.cpp comes from, and what pins it."""
