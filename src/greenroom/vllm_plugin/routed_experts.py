"""What stands in for vLLM's ``RoutedExperts``, below its router, its shared experts and its all-reduce.

vLLM makes layers through a registry of replacements by class name. Outside of a worker that offloads, the replacement
behaves as the class that it stands for.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.custom_op import PluggableLayer, op_registry_oot
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.utils import set_weight_attrs

from greenroom.errors import ConfigError, UnsupportedModelError
from greenroom.experts.formats import ExpertViews
from greenroom.vllm_plugin.formats import LayerFormat, deinterleave_, layer_format
from greenroom.vllm_plugin.rank import RankExperts, rank_being_built

RunExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden [T, H], ids [T, K], weights [T, K]) -> [T, H]."""

_UNQUANTIZED = "UnquantizedFusedMoEMethod"


def replace_routed_experts() -> None:
    """Has vLLM make offloading layers for ``RoutedExperts`` and every subclass known so far. Idempotent."""
    for cls in (RoutedExperts, *_subclasses(RoutedExperts)):
        if issubclass(cls, OffloadingLayer) or cls.__name__ in op_registry_oot:
            continue
        PluggableLayer.register_oot(type(cls.__name__, (OffloadingLayer, cls), {}), name=cls.__name__)


class OffloadingLayer(RoutedExperts):
    """Mixed in before a class of routed experts."""

    offloaded: RunExperts | None = None
    """Runs the layer, once the rank is ready."""

    def _get_quant_method(self, prefix: str, quant_config: Any, moe_config: Any) -> FusedMoEMethodBase:
        rank = rank_being_built()
        if rank is None:
            return super()._get_quant_method(prefix, quant_config, moe_config)
        return make_method(super()._get_quant_method(prefix, quant_config, moe_config), rank, self)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """While experts are offloaded, empty stand-ins on the GPU under the names of the real ones.

        vLLM would bring the real ones to the GPU to post-process them, and wants their names to see what was loaded.
        Those who load weights ask the whole model, which does not come through here.
        """
        own = super().named_parameters(*args, **kwargs)
        if not isinstance(self.quant_method, OffloadedMethod):
            return own
        stand_in = torch.nn.Parameter(torch.empty(0, device=self.quant_method.device), requires_grad=False)
        return ((name, stand_in) for name, _ in own)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Leaves out experts that are to be made up: vLLM would draw each number on one core."""
        if not (isinstance(self.quant_method, OffloadedMethod) and self.quant_method.dummy):
            super()._save_to_state_dict(destination, prefix, keep_vars)

    def forward_modular(
        self,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not isinstance(self.quant_method, OffloadedMethod):
            return super().forward_modular(x, topk_weights, topk_ids, *args, **kwargs)
        if torch.compiler.is_compiling():
            # Where vLLM does not hide the whole layer in an operator of its own, this one keeps a compiler out.
            return torch.ops.greenroom.routed_experts(x, topk_weights, topk_ids, self.layer_name)
        return self.run_offloaded(x, topk_weights, topk_ids)

    def run_offloaded(self, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]; this rank's part of the sum."""
        assert self.offloaded is not None, "the worker has not made the experts ready"
        expert_map = self._expert_map
        ids = topk_ids if expert_map is None else expert_map[topk_ids.long()]
        return self.offloaded(x, ids, topk_weights)


@torch.library.custom_op("greenroom::routed_experts", mutates_args=())
def _routed_experts(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, layer_name: str
) -> torch.Tensor:
    layer = get_forward_context().no_compile_layers[layer_name].routed_experts
    out: torch.Tensor = layer.run_offloaded(x, topk_weights, topk_ids)
    return out


@_routed_experts.register_fake
def _(x: torch.Tensor, *_rest: object) -> torch.Tensor:
    return torch.empty_like(x)


def make_method(stock: FusedMoEMethodBase, rank: RankExperts, layer: RoutedExperts) -> FusedMoEMethodBase:
    """The method of an offloaded layer whose stock method would be ``stock``. Further formats come in here.

    Raises:
        UnsupportedModelError: a quantisation, or a property of the layer, that offloading does not have.
    """
    name = type(stock).__name__
    if name != _UNQUANTIZED:
        raise UnsupportedModelError(
            f"--moe-offload does not support experts quantised by {name} yet; use a BF16 or FP16 checkpoint, or run "
            "without it"
        )
    if layer.apply_router_weight_on_input:
        raise UnsupportedModelError(
            "--moe-offload does not support models that weight the experts' inputs; run without it"
        )
    method = type(_UNQUANTIZED, (OffloadedMethod,), {})
    made: FusedMoEMethodBase = method(layer.moe_config, rank)
    return made


class OffloadedMethod(FusedMoEMethodBase):
    """Weights that vLLM's own loaders write straight into host memory. One a layer.

    Its instances' class is called like the stock one: loaders tell formats apart by that name.
    """

    def __init__(self, moe: Any, rank: RankExperts) -> None:
        super().__init__(moe)
        self._rank = rank
        self._layer_format: LayerFormat | None = None
        self._views: ExpertViews | None = None
        self.dummy = rank.dummy
        self.device = rank.device
        self.index = -1

    def create_weights(
        self,
        layer: torch.nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        """Parameters of ``layer`` that are views of the store."""
        limits = (getattr(layer, name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta"))
        self._layer_format = layer_format(self.moe, params_dtype, *limits)
        self.index, store = self._rank.add_layer(self._layer_format, num_experts, self.moe.experts_per_token)
        self._views = store.views(0)
        for name, view in self._named_views():
            parameter = torch.nn.Parameter(view, requires_grad=False)
            layer.register_parameter(name, parameter)
            set_weight_attrs(parameter, extra_weight_attrs)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Brings what was loaded to the blocks' layout and takes the parameters away: the store alone has them.

        Raises:
            ConfigError: another kind of offloading took them first.
        """
        assert self._layer_format is not None
        for name, view in self._named_views():
            parameter = layer._parameters.pop(name, None)
            if parameter is not None and parameter.data_ptr() != view.data_ptr():
                raise ConfigError(
                    "another kind of weight offloading took experts that --moe-offload keeps in host memory; name "
                    "other weights with --cpu-offload-params or --offload-params (such as self_attn)"
                )
        if self.dummy and self._views is not None:
            _make_up(self._views, self.index)
        if self._layer_format.interleaved and self._views is not None:
            for expert in range(len(self._views.up)):
                deinterleave_(self._views.up[expert])
                if self._views.up_bias is not None:
                    deinterleave_(self._views.up_bias[expert])
        self._views = None

    def get_fused_moe_quant_config(self, layer: torch.nn.Module) -> Any:
        """vLLM asks before each forward; nothing here uses it."""
        return FUSED_MOE_UNQUANTIZED_CONFIG

    def _named_views(self) -> list[tuple[str, torch.Tensor]]:
        views = self._views
        if views is None:
            return []
        named = [("w13_weight", views.up), ("w2_weight", views.down)]
        if views.up_bias is not None and views.down_bias is not None:
            named += [("w13_bias", views.up_bias), ("w2_bias", views.down_bias)]
        return named


def _make_up(views: ExpertViews, seed: int) -> None:
    """Small random weights, as vLLM's own: every expert another stretch of the same numbers."""
    generator = torch.Generator().manual_seed(seed)
    for part in (views.up, views.down, views.up_bias, views.down_bias):
        if part is None:
            continue
        experts, size = len(part), part[0].numel()
        noise = torch.empty(2 * size, dtype=part.dtype).uniform_(-1e-3, 1e-3, generator=generator)
        for expert in range(experts):
            start = size * expert // experts
            part[expert].copy_(noise[start : start + size].view(part.shape[1:]))


def offloading_layers(model: torch.nn.Module) -> list[OffloadingLayer]:
    """The offloaded layers of a loaded model, in the order of the store.

    Raises:
        UnsupportedModelError: some layer's experts are elsewhere.
    """
    layers: list[OffloadingLayer] = []
    for name, module in model.named_modules():
        if not isinstance(module, RoutedExperts):
            continue
        if not isinstance(module, OffloadingLayer) or not isinstance(module.quant_method, OffloadedMethod):
            raise UnsupportedModelError(
                f"--moe-offload cannot take over the experts of '{name}' ({type(module).__name__}); run without it"
            )
        layers.append(module)
    return sorted(layers, key=lambda layer: layer.quant_method.index)


def _subclasses(cls: Any) -> Iterator[Any]:
    for child in cls.__subclasses__():
        yield child
        yield from _subclasses(child)
