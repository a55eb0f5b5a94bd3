"""Which versions of vLLM are run in silently, with a warning, or not at all."""

import pytest

from greenroom.errors import ConfigError
from greenroom.vllm_plugin.versions import judge


@pytest.mark.parametrize("version", ["0.26.0", "0.26.3+cu130", "0.32.0", "0.32.0rc1"])
def test_tested(version):
    assert judge(version) is None


@pytest.mark.parametrize("version", ["0.27.0", "0.33.1", "1.0", "dev"])
def test_unknown_versions_are_warned_about(version):
    warning = judge(version)
    assert warning is not None
    assert "0.26 and 0.32" in warning
    assert version in warning


@pytest.mark.parametrize("version", ["0.25.9", "0.9.2"])
def test_old_versions_are_refused(version):
    with pytest.raises(ConfigError, match=r"needs vLLM 0\.26 or later"):
        judge(version)
