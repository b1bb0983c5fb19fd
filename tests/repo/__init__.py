"""Run kvtool on real git repositories. Failed asserts in helper modules show their values, like those in tests."""

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{name}" for name in ("edits", "fetches", "kills", "rebases")))
