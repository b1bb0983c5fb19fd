"""Run upstream's tools/server/tests with a local text model instead of downloads (a plugin for pytest).

    KVTOOL_SERVER_MODEL=FILE pytest -p offline_server_models

Upstream's tests need small trained models from the Hugging Face hub. A model with random weights is enough for
questions about the server's protocol: counts of tokens, slots, states, errors and streams. It is not enough for
questions about the text, so such a test fails with any kind of cache. Therefore ci/upstream_tests.py compares the
outcomes of several builds, and does not use the outcomes alone. A comparison of a text with a pattern always succeeds,
so that a test continues with its later steps. Tests of other models (vision, adapters, function calls) are skipped.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

STOOD_IN_FOR = (
    "ggml-org/test-model-stories260K",
    "ggml-org/test-model-stories260K-infill",
    "ggml-org/stories15M_MOE",
    "ggml-org/models",  # tinyllamas, and the encoders of the tests on embeddings
)
DRAFTS = "stories15M-q4_0.gguf"


def pytest_sessionstart() -> None:
    """Replace functions of upstream's module `utils`, so that its servers use the local model.

    This must happen after its conftest has imported the module, and before a test module imports names from it.
    """
    utils = sys.modules["utils"]
    model = os.environ["KVTOOL_SERVER_MODEL"]
    start = utils.ServerProcess.start

    def offline_start(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.model_url or (self.model_hf_repo and self.model_hf_repo not in STOOD_IN_FOR):
            pytest.skip(f"needs a download: {self.model_url or self.model_hf_repo}")
        if self.model_hf_repo:
            self.model_file, self.model_hf_repo, self.model_hf_file = model, None, None
        if self.server_embeddings and self.pooling is None:
            self.pooling = "mean"  # an encoder would set its own pooling, but the local model is not an encoder
        self.n_threads = 1  # with several threads, sums are rounded in another way, which is not what is tested here
        start(self, *args, **kwargs)

    def offline_file(url: str, *_: Any) -> str:
        if not url.endswith(DRAFTS):
            pytest.skip(f"needs a download: {url}")
        return model

    utils.ServerProcess.start = offline_start
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = offline_file
    utils.match_regex = lambda *_: True
