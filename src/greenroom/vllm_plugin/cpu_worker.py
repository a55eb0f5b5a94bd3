"""The worker of vLLM's CPU build, with offloaded experts."""

from vllm.v1.worker.cpu_worker import CPUWorker

from greenroom.vllm_plugin.worker import OffloadMixin


class OffloadCPUWorker(OffloadMixin, CPUWorker):
    """Every step is decided by the host; slots are ordinary memory."""
