"""kvtool bench: what a static cache, one that grows by copy and one that grows in place cost, side by side."""
