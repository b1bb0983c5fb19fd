"""Replace setuptools while pip downloads a source archive, so that no code of the archive runs."""
