"""The decode loop of ``generate``: transformers' sampling and stopping around a runner.

``model.generate`` takes a callable (``custom_generate``) that it calls in place of its own loop, with everything
prepared: logits processors, stopping criteria, lengths. It hands the prompt to the streamer itself, but does
not pass the streamer on.
"""

import time
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from greenroom.engine.arrival import Arrival
from greenroom.engine.cache_argument import why_no_plain_cache
from greenroom.engine.capturable import why_host_needed, why_not_readable
from greenroom.engine.offload import offload_of
from greenroom.engine.paged.probe import PagedModel, probe
from greenroom.engine.paged.runner import why_not_by_kernel
from greenroom.engine.paged.sequence_runner import SequenceRunner
from greenroom.errors import ConfigError

if TYPE_CHECKING:
    from greenroom.engine.step_runner import StepRunner

_ROUND = 64
"""Tokens: a KV cache is a multiple of it."""

_ATTENTION = ("sdpa", "greenroom", "eager")
"""Implementations of attention that mask a KV cache of fixed size."""


def can_run_graph(model: PreTrainedModel) -> str | None:
    """None if ``model`` can decode by graph, otherwise the sentence why not. What costs a pass is asked only once."""
    try:
        offload = offload_of(model)
    except ConfigError as error:
        return str(error)
    if offload.device.type != "cuda":
        return "the model runs on the CPU, which has no graphs"
    return why_not_readable(offload) or why_not_captured(model)


def why_not_captured(model: PreTrainedModel) -> str | None:
    """Of an offloaded model on a GPU: None if its forward pass can be captured, otherwise why not."""
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        return f"decode graphs need sdpa attention, not {attention}"
    if (problem := why_host_needed(model)) is not None or why_no_plain_cache(model) is None:
        return problem
    return DecodeLoop.of(model).why_no_blocks()


class DecodeLoop:
    """Decodes one model, with a runner that later calls use again as long as their sequences fit into it.

    Attributes:
        prepare_seconds: what the last call spent on making its runner ready, between its first and second token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._runner: StepRunner | SequenceRunner | None = None
        self.prepare_seconds = 0.0

    @classmethod
    def of(cls, model: PreTrainedModel) -> "DecodeLoop":
        """The one loop of ``model``, which is closed with it.

        Raises:
            ConfigError: the model did not come from ``load``.
        """
        companions = offload_of(model).companions
        for companion in companions:
            if isinstance(companion, cls):
                return companion
        loop = cls(model)
        companions.append(loop)
        return loop

    def generate(self, input_ids: torch.Tensor, streamer: BaseStreamer | None = None, **options: Any) -> torch.Tensor:
        """``model.generate`` with this loop in place of its own.

        Args:
            input_ids: int64 [B, T], without padding.
            options: further ones of ``model.generate``. Beams, scores and caches are not served.

        Returns:
            int64 [B, T + new tokens].
        """

        def loop(
            _model: PreTrainedModel,
            input_ids: torch.Tensor,
            logits_processor: LogitsProcessorList,
            stopping_criteria: StoppingCriteriaList,
            generation_config: GenerationConfig,
            **model_kwargs: Any,
        ) -> torch.Tensor:
            mask = model_kwargs.get("attention_mask")  # newer versions drop one that is all ones
            if mask is not None and not mask.all():
                raise ConfigError("decode graphs take prompts of equal length, without padding")
            return self._sample(input_ids, logits_processor, stopping_criteria, generation_config, streamer)

        result: torch.Tensor = self._model.generate(input_ids, streamer=streamer, custom_generate=loop, **options)
        return result

    def why_no_blocks(self) -> str | None:
        """None if blocks hold what the model remembers and a kernel can attend to them, otherwise why not."""
        if isinstance(self._kept, str):
            return self._kept
        return why_not_by_kernel(self._model, self._kept)

    def close(self) -> None:
        """Frees the runner. Idempotent."""
        if self._runner is not None:
            self._runner.close()
        self._runner = None

    def _sample(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        config: GenerationConfig,
        streamer: BaseStreamer | None,
    ) -> torch.Tensor:
        """The same decisions, in the same order, as transformers' own loop: a seed gives the same tokens.

        Tokens are looked at while the next step runs, where the runner can: when they are the last, it is one too many.
        """
        self.prepare_seconds = 0.0
        runner = self._runner_for(len(input_ids), config.max_length)
        has_end = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        unfinished = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        logits = runner.prefill(input_ids, prepare=False)
        try:
            while True:
                scores = logits_processor(input_ids, logits.to(torch.float32, copy=True))
                if config.do_sample:
                    tokens = torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)
                else:
                    tokens = scores.argmax(-1)
                if has_end:
                    tokens = tokens.where(unfinished, config.pad_token_id)
                input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
                unfinished &= ~stopping_criteria(input_ids, None)
                chosen, going_on = Arrival(tokens), Arrival(unfinished)
                # What takes long to prepare must not hold up the first tokens.
                ahead = runner.runs_ahead and runner.prepared and input_ids.shape[1] < config.max_length
                if ahead:
                    logits = runner.start(tokens[:, None])  # waits for the step that these tokens come from
                else:
                    runner.wait()
                if streamer is not None:
                    streamer.put(torch.from_numpy(chosen.wait()))
                if not going_on.wait().any():
                    break
                if not ahead:
                    self._prepare(runner)
                    logits = runner.start(tokens[:, None])
        finally:
            runner.discard()
        if streamer is not None:
            streamer.end()
        return input_ids

    @cached_property
    def _kept(self) -> PagedModel | str:
        """Found by running a token."""
        return probe(self._model)

    def _prepare(self, runner: "StepRunner | SequenceRunner") -> None:
        if runner.prepared:
            return
        started = time.perf_counter()
        runner.prepare()
        self.prepare_seconds = time.perf_counter() - started

    def _runner_for(self, rows: int, tokens: int) -> "StepRunner | SequenceRunner":
        """One for ``rows`` sequences of up to ``tokens``: the last one if it is large enough."""
        last = self._runner
        if last is not None and last.usable and last.rows == rows and tokens <= last.max_length:
            return last
        size = tokens
        if last is not None and last.usable and last.rows == rows:
            # It has been outgrown, as by a conversation: with some room, the next turns fit as well.
            size += tokens // 4
        self.close()
        limit = getattr(self._model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None:
            size = max(tokens, min(size, limit))
        self._runner = self._make_runner(rows, -(-size // _ROUND) * _ROUND)
        return self._runner

    def _make_runner(self, rows: int, max_length: int) -> "StepRunner | SequenceRunner":
        """The faster one where there are both."""
        if why_no_plain_cache(self._model) is not None:
            if isinstance(self._kept, str):
                raise ConfigError(self._kept)
            return SequenceRunner(self._model, self._kept, rows, max_length)
        from greenroom.engine.step_runner import StepRunner  # needs triton, which GPU builds of torch bring

        return StepRunner(self._model, rows, max_length)
