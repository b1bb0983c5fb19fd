"""A pytest plugin for upstream's tools/server/tests: a model that speaks stands in for the ones it would download.

    KVTOOL_SERVER_MODEL=FILE pytest -p offline_server_models

Upstream's tests want small trained models from the Hugging Face hub. What a test asks of the server's protocol (counts
of tokens, slots, states, errors, streams) a model with random weights answers as well; what it asks of the text, such a
model cannot, and the test fails with any cache. ci/upstream_tests.py therefore compares outcomes between builds and
takes none of them for itself. What a text matches is not looked at, so that a test goes on to what comes after. Tests
of other models (vision, adapters, function calls) are skipped.
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
    """Once upstream's conftest has imported its utils, and before any test module takes names out of them."""
    utils = sys.modules["utils"]
    model = os.environ["KVTOOL_SERVER_MODEL"]
    start = utils.ServerProcess.start

    def offline_start(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.model_url or (self.model_hf_repo and self.model_hf_repo not in STOOD_IN_FOR):
            pytest.skip(f"needs a download: {self.model_url or self.model_hf_repo}")
        if self.model_hf_repo:
            self.model_file, self.model_hf_repo, self.model_hf_file = model, None, None
        if self.server_embeddings and self.pooling is None:
            self.pooling = "mean"  # what stands in is no encoder, which would have a pooling of its own
        self.n_threads = 1  # several threads split sums by their number, not by the cache: not what is compared here
        start(self, *args, **kwargs)

    def offline_file(url: str, *_: Any) -> str:
        if not url.endswith(DRAFTS):
            pytest.skip(f"needs a download: {url}")
        return model

    utils.ServerProcess.start = offline_start
    utils.ServerPreset.load_all = staticmethod(lambda: None)
    utils.download_file = offline_file
    utils.match_regex = lambda *_: True
