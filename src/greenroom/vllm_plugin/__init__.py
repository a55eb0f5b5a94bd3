"""Expert offloading inside stock vLLM, as a plugin.

``register`` is the entry point of group ``vllm.general_plugins``. It adds flags; an engine that is started with them
gets a worker class of ours, which is the only thing that differs from stock vLLM.
"""

from greenroom.vllm_plugin.plugin import register

__all__ = ["register"]
