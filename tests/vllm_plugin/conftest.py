"""Engines of vLLM's CPU build: small, on this machine alone."""

import pytest

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
}


@pytest.fixture
def vllm_environment(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """Folders of tiny random models by family and dtype, each made once."""
    from tests.vllm_plugin.models import save_tiny

    folders = {}

    def make(family, dtype):
        if (family, dtype) not in folders:
            folders[family, dtype] = save_tiny(family, tmp_path_factory.mktemp(family), dtype)
        return folders[family, dtype]

    return make
