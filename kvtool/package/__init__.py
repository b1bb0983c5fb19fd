"""What `kvtool package` is made of: what goes in, the archive itself, and the proof that it runs elsewhere."""
