"""The series and the patched tree."""
