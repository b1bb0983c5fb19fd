"""Stands in for setuptools while pip downloads a source archive, so that nothing of the archive is executed."""
