"""The flags inside vLLM's ``EngineArgs``, which the command line and ``LLM(...)`` share."""

import argparse
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs

from greenroom.errors import ConfigError
from greenroom.vllm_plugin.conflicts import check_arguments, check_config, choose_worker, limit_graphs
from greenroom.vllm_plugin.metrics import serve_metrics
from greenroom.vllm_plugin.options import CONFIG_KEY, FLAGS, MoeOffloadOptions, collect
from greenroom.vllm_plugin.versions import judge, vllm_version

logger = logging.getLogger("vllm.greenroom")  # below vLLM's own, which has the handlers

_MARK = "_greenroom"


def install() -> None:
    """Wraps the methods of ``EngineArgs`` that see arguments. Idempotent.

    Raises:
        ConfigError: this vLLM has no such methods.
    """
    if hasattr(EngineArgs, _MARK):
        return
    for name in ("add_cli_args", "from_cli_args", "create_engine_config"):
        if not hasattr(EngineArgs, name):
            raise ConfigError(f"vLLM {vllm_version()} has no EngineArgs.{name}, which greenroom's flags need")
    # Set on the class, so that a second copy of this module sees it as well.
    setattr(EngineArgs, _MARK, True)
    # Static and class methods are wrapped as such; AsyncEngineArgs has its own __init__ but inherits the others.
    EngineArgs.add_cli_args = staticmethod(_with_flags(EngineArgs.add_cli_args))
    EngineArgs.from_cli_args = classmethod(_from_cli(EngineArgs.from_cli_args.__func__))
    EngineArgs.create_engine_config = _with_offload(EngineArgs.create_engine_config)
    for cls in (EngineArgs, AsyncEngineArgs):
        cls.__init__ = _with_keywords(cls.__init__)


def _with_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def add_cli_args(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group(
            title="MoeOffload", description="Expert offloading: routed experts in host memory (greenroom)."
        )
        for flag in FLAGS:
            name = "--" + flag.name.replace("_", "-")
            if flag.type is bool:
                group.add_argument(name, action=argparse.BooleanOptionalAction, default=None, help=flag.help)
            else:
                group.add_argument(name, type=flag.type, default=None, help=flag.help)
        return parser

    return add_cli_args


def _from_cli(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        engine_args = original(cls, args)
        _fold(engine_args, vars(args))
        return engine_args

    return from_cli_args


def _with_keywords(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        ours = {flag.name: kwargs.pop(flag.name) for flag in FLAGS if flag.name in kwargs}
        original(self, *args, **kwargs)
        _fold(self, ours)

    return init


def _fold(engine_args: Any, arguments: Mapping[str, Any]) -> None:
    """Writes what the flags say into ``additional_config``."""
    fields = collect(arguments)
    if fields is None:
        return
    additional = engine_args.additional_config
    if not isinstance(additional, Mapping):
        raise ConfigError(f"--moe-offload needs additional_config to be a dictionary, not {type(additional).__name__}")
    if additional.get(CONFIG_KEY) is not None:
        raise ConfigError(
            f"expert offloading is configured twice, by --moe-offload and by additional_config['{CONFIG_KEY}']; "
            "give one of them"
        )
    options = MoeOffloadOptions(**fields)
    engine_args.additional_config = {**additional, CONFIG_KEY: options.to_dict()}


def _with_offload(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        options = MoeOffloadOptions.from_additional_config(self.additional_config)
        if options is None:
            return original(self, *args, **kwargs)
        _judge_once(vllm_version())
        check_arguments(self)
        self.additional_config = {**self.additional_config, CONFIG_KEY: options.to_dict()}
        self.worker_cls = choose_worker(self.worker_cls)
        limit_graphs(self)
        config = original(self, *args, **kwargs)
        check_config(config)
        serve_metrics(config.instance_id)
        return config

    return create_engine_config


@functools.cache
def _judge_once(version: str) -> None:
    if warning := judge(version):
        logger.warning(warning)
