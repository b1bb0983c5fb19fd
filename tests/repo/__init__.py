"""Tests on real git repositories; a failed assert in a helper module shows its values, as one in a test does."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("edits", "fetches", "kills", "rebases")))
