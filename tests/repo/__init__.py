"""Test kvtool with real git repositories. If an assert in a helper module fails, it shows its values as in a test."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("edits", "fetches", "kills", "rebases")))
