"""open_engine: from a loaded model to an engine that takes requests."""

from contextlib import ExitStack

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from greenroom.engine.batch import BatchRunner
from greenroom.engine.generation import check_context, context_length
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.runner import PagedRunner
from greenroom.engine.runners import make_runner
from greenroom.engine.sizes import KV_BLOCK
from greenroom.errors import ConfigError
from greenroom.kv.config import KVOffloadConfig
from greenroom.kv.offload import HostKVOffload
from greenroom.serving.engine import ModelFacts, ServingEngine
from greenroom.serving.params import check_params
from greenroom.serving.rehearsal import rehearse
from greenroom.serving.requests import SamplingParams

_CONTEXT_IF_UNKNOWN = 4096

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Of a model's generation settings, those that say how tokens are chosen."""


def open_engine(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kv_bytes: int | None = None,
    num_blocks: int | None = None,
    max_context: int | None = None,
    max_step_tokens: int = 2048,
    max_sequences: int = 32,
    max_waiting: int = 128,
    block_size: int = KV_BLOCK,
    kv_offload: KVOffloadConfig | None = None,
    dbo: str = "off",
) -> ServingEngine:
    """An engine over an offloaded model, which has to stay open as long as the engine.

    Args:
        kv_bytes, num_blocks: of the KV cache, one of them; a model whose cache is not made of blocks needs neither.
        max_context: tokens that prompt and output of one request may have; None for what the model can.
        max_step_tokens: tokens of one pass: a longer prompt takes several, and others go on between them.
        max_sequences: requests that run at once.
        max_waiting: requests that wait beside them.
        block_size: tokens a KV block.
        kv_offload: host memory for KV blocks; None for none.
        dbo: see ``make_runner``.

    Raises:
        ConfigError: numbers that make no sense together, or KV offload for a model whose cache is not made of blocks,
            or ``dbo`` is on and nothing can run as halves.
        EngineError: decode could not be prepared, or on a GPU the largest pass failed.
        MemoryLimitError: the KV cache does not hold one request of ``max_context`` tokens, or host memory does not
            suffice for KV offload.
    """
    known = context_length(model)
    if max_context is not None:
        check_context(max_context, known)
    context = max_context or known or _CONTEXT_IF_UNKNOWN
    runner = make_runner(
        model,
        max_tokens=max_step_tokens,
        max_context=context,
        kv_bytes=kv_bytes,
        num_blocks=num_blocks,
        block_size=block_size,
        max_sequences=max_sequences,
        dbo=dbo,
    )
    facts = ModelFacts(
        vocabulary=model.config.get_text_config().vocab_size,
        context_length=context,
        end_tokens=end_tokens(model, tokenizer),
        device=offload_of(model).device,
    )
    with ExitStack() as stack:
        stack.callback(runner.close)
        offload = None
        if kv_offload is not None:
            offload = _open_offload(kv_offload, runner, model)
            stack.callback(offload.close)
        reuse = False
        if isinstance(runner, PagedRunner):
            reuse = True
            runner.prepare()  # or the first requests would wait for it
            if facts.device.type == "cuda":
                # Behind the capture of decode steps, which frees what torch keeps.
                rehearse(model, runner)
        engine = ServingEngine(facts, tokenizer, runner, max_waiting=max_waiting, offload=offload, reuse=reuse)
        stack.pop_all()  # the engine closes them
        return engine


def _open_offload(config: KVOffloadConfig, runner: BatchRunner, model: PreTrainedModel) -> HostKVOffload:
    if not isinstance(runner, PagedRunner):
        raise ConfigError("this model's cache is not made of blocks, so none can go to host memory; drop --kv-offload")
    offload = offload_of(model)
    if offload.device.type == "cuda" and not offload.config.pin_memory:
        raise ConfigError("KV blocks in host memory are page-locked; drop --kv-offload or --no-pin-memory")
    return HostKVOffload(config, runner.kv_tensors)


def sampling_defaults(model: PreTrainedModel) -> SamplingParams:
    """How the model's authors want its tokens chosen, by its generation settings; what those leave open is neutral.

    Raises:
        ConfigError: the settings make no sense.
    """
    config = model.generation_config
    given = {} if config is None else config.to_diff_dict()
    chosen = {name: given[name] for name in _SAMPLING if given.get(name) is not None}
    if given.get("do_sample") is False:
        chosen["temperature"] = 0.0
    params = SamplingParams(**chosen)
    try:
        check_params(params, model.config.get_text_config().vocab_size)
    except ConfigError as error:
        raise ConfigError(
            f"the model's generation settings cannot be used: {error}; take OpenAI's (--sampling-defaults openai)"
        ) from error
    return params


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Tokens that end an output: those of the generation settings and of the tokenizer."""
    of_model = model.generation_config.eos_token_id if model.generation_config is not None else None
    listed = of_model if isinstance(of_model, (list, tuple)) else [of_model]
    return frozenset(token for token in [*listed, tokenizer.eos_token_id] if token is not None)
