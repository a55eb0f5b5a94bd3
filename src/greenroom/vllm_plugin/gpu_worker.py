"""The worker of vLLM on a GPU, with offloaded experts."""

from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.v1.worker.gpu_worker import Worker

from greenroom.errors import ConfigError
from greenroom.vllm_plugin.gpu_steps import GpuStepDriver
from greenroom.vllm_plugin.rank import RankExperts
from greenroom.vllm_plugin.resident import resident_layers
from greenroom.vllm_plugin.routed_experts import OffloadingLayer
from greenroom.vllm_plugin.steps import NoSteps, StepDriver
from greenroom.vllm_plugin.worker import OffloadMixin


class OffloadGPUWorker(OffloadMixin, Worker):
    """Both of vLLM's model runners replay full graphs without calling the model; here that is a step as well."""

    def make_steps(self, experts: RankExperts, layers: list[OffloadingLayer]) -> StepDriver:
        """Also has replays of full graphs run as steps."""
        assert experts.manager is not None
        if (runs := resident_layers(experts.manager, layers)) is not None:
            for layer, run in zip(layers, runs, strict=True):
                layer.offloaded = run
            return NoSteps(experts)
        steps = GpuStepDriver(experts)
        wrapper = getattr(self.model_runner, "model", None)
        if isinstance(wrapper, CUDAGraphWrapper):
            self.model_runner.model = SteppedGraphs(wrapper, steps)
        elif wrapper is not self.model_runner.get_model():
            raise ConfigError(
                f"--moe-offload does not support vLLM's {type(wrapper).__name__}; set VLLM_USE_BREAKABLE_CUDAGRAPH=0"
            )
        return steps

    def load_model(self, **kwargs: Any) -> None:
        """Also adds slots and buffers to what vLLM takes for weights when it sizes the KV cache."""
        super().load_model(**kwargs)
        assert self.experts is not None
        self.model_runner.model_memory_usage += self.experts.device_bytes

    def compile_or_warm_up_model(self) -> Any:
        """Also has the second model runner's replays run as steps; its graphs' manager exists by now."""
        manager, steps = getattr(self.model_runner, "cudagraph_manager", None), self.steps
        if manager is not None and isinstance(steps, GpuStepDriver):
            replay = manager.run_fullgraph

            def stepped(desc: Any) -> Any:
                return steps.run(desc.num_tokens, lambda: replay(desc))

            manager.run_fullgraph = stepped
        return super().compile_or_warm_up_model()


class SteppedGraphs(CUDAGraphWrapper):
    """A wrapper like ``wrapper`` whose captures and replays are steps."""

    def __init__(self, wrapper: CUDAGraphWrapper, steps: StepDriver) -> None:
        super().__init__(wrapper.unwrap(), wrapper.vllm_config, wrapper.runtime_mode, wrapper.cudagraph_options)
        self._steps = steps

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        context = get_forward_context() if is_forward_context_available() else None
        if context is None or context.cudagraph_runtime_mode != CUDAGraphMode.FULL:
            return super().__call__(*args, **kwargs)
        replay = super().__call__
        return self._steps.run(context.batch_descriptor.num_tokens, lambda: replay(*args, **kwargs))
