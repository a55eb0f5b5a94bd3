"""StepRunner: decode steps of one batch, each one CUDA graph with all its layers and its experts in it.

On a CPU device, or with ``graph=False``, the same work is done eagerly.
"""

import torch
from transformers import DynamicCache, PreTrainedModel

from greenroom.engine.cache_argument import cache_argument, why_no_plain_cache
from greenroom.engine.fixed_cache import FixedCache
from greenroom.engine.fusion import use_decode_attention
from greenroom.engine.hostless_steps import WARM_UP_STEPS, HostlessSteps
from greenroom.engine.offload import offload_of
from greenroom.engine.sizes import bucket_for, check_batch
from greenroom.errors import ConfigError, EngineError
from greenroom.experts.decode_steps import DecodeSteps


class StepRunner:
    """Prefill and decode of ``rows`` sequences of equal length, in a KV cache of fixed size.

    One thread at a time. The model must not be closed before the runner, and its forward may be called between steps.

    Attributes:
        rows: sequences.
        max_length: tokens of the KV cache, prompt included.
        runs_ahead: whether a step may be under way when ``start`` returns.
    """

    runs_ahead = True

    def __init__(
        self, model: PreTrainedModel, rows: int, max_length: int, *, graph: bool = True, watchdog_s: float = 30.0
    ) -> None:
        """
        Args:
            model: offloaded.
            rows: sequences, at most the largest bucket.
            max_length: tokens of the KV cache, prompt included.
            graph: capture steps, on a GPU.
            watchdog_s: seconds after which a step that has not ended (on a CPU device: a layer) is given up.

        Raises:
            ConfigError: too many rows, or the model's cache is no plain K/V cache.
        """
        check_batch(rows)
        if (problem := why_no_plain_cache(model)) is not None:
            raise ConfigError(problem)
        self.rows = rows
        self.max_length = max_length
        self._model = model
        self._offload = offload_of(model)
        self._device = self._offload.device
        self._bucket = bucket_for(rows)
        self._watchdog_s = watchdog_s
        self._cache_name = cache_argument(model)
        use_decode_attention(model)
        self._use_graph = graph and self._device.type == "cuda"
        self._graph: torch.cuda.CUDAGraph | None = None
        self._hostless: HostlessSteps | None = None
        self._unusable: str | None = None
        self._length: int | None = None  # tokens in the KV cache; None while there is nothing to continue
        self._ids = torch.zeros(self._bucket, 1, dtype=torch.long, device=self._device)
        self._positions = torch.zeros(self._bucket, 1, dtype=torch.long, device=self._device)
        # Where each row's next token goes is what each row has.
        self._cache: FixedCache | None = FixedCache(model.config, self._bucket, max_length, self._positions[0])
        self._logits: torch.Tensor | None = None

    @property
    def usable(self) -> bool:
        """Whether ``prefill`` may be called: neither closed nor given up."""
        return self._unusable is None

    @property
    def prepared(self) -> bool:
        """Whether ``prepare`` has been done."""
        return self._hostless is not None

    @property
    def steps(self) -> DecodeSteps:
        """The experts' side of the steps; there once the runner is prepared."""
        return self._prepared().steps

    @torch.no_grad()
    def prefill(self, prompts: torch.Tensor, *, prepare: bool = True) -> torch.Tensor:
        """Starts all sequences anew.

        Args:
            prompts: int64 [rows, T] on the device.
            prepare: also calls ``prepare``; otherwise the first step does.

        Returns:
            [rows, vocabulary]: logits of the last position. The likeliest tokens are the next step's input,
            unless that gives others.

        Raises:
            ConfigError: the prompts do not fit.
            EngineError: the runner was closed or given up.
        """
        self._check_usable()
        rows, length = prompts.shape
        if rows != self.rows or not 1 <= length < self.max_length:
            raise ConfigError(
                f"the runner takes [{self.rows}, < {self.max_length}] prompt tokens, not {[*prompts.shape]}"
            )
        self.discard()
        self._length = None
        cache = DynamicCache(config=self._model.config)
        logits = self._model(input_ids=prompts, use_cache=True, logits_to_keep=1, **{self._cache_name: cache}).logits[
            :, -1
        ]
        self._fixed().take_over(cache, length)
        self._set_length(length)
        self._ids[:rows] = logits.argmax(-1, keepdim=True)
        if prepare:
            self.prepare()
        return logits

    @torch.no_grad()
    def prepare(self) -> None:
        """Makes ready for steps, once: builds the experts' path and, on a GPU, compiles kernels and captures a step.

        Raises:
            EngineError: nothing has been prefilled, or the runner was closed or given up.
        """
        self._check_usable()
        if self.prepared:
            return
        self._check_can_step()
        try:
            self._prepare()
        except BaseException as error:
            self.close()
            self._unusable = f"the runner could not be prepared: {error}"
            raise

    @torch.no_grad()
    def step(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """One token more for every sequence.

        Args:
            ids: int64 [rows, 1], the tokens to feed; None feeds the likeliest ones of the step before.

        Returns:
            [rows, vocabulary] logits, overwritten by the next step.

        Raises:
            ConfigError: the KV cache is full.
            EngineError: nothing has been prefilled, or the runner was closed or given up. Or the CPU engine failed
                in this step: the sequences are lost, and ``prefill`` starts others. Or the step did not end in
                time: the runner is of no more use and should be closed. Both name layer and step.
        """
        logits = self.start(ids)
        self.wait()
        return logits

    @torch.no_grad()
    def start(self, ids: torch.Tensor | None = None) -> torch.Tensor:
        """``step`` that does not wait for its own end, but for that of the step before: so the device has work while
        the host looks at what came before.

        Returns:
            As ``step``; work behind it on the device's current stream finds it complete. Whether the CPU engine failed
            in it, the next call says, or ``wait``.

        Raises:
            ConfigError, EngineError: as ``step``, of this step or of the one before.
        """
        if self._check_can_step() >= self.max_length:
            raise ConfigError(f"the KV cache of {self.max_length} tokens is full")
        self.prepare()
        if ids is not None:
            self._ids[: self.rows] = ids
        self._start_step()
        self._waited_for(leave=1)
        assert self._logits is not None
        return self._logits[: self.rows]

    def wait(self) -> None:
        """Waits for the step that was started, if it has not been waited for.

        Raises:
            EngineError: as ``step``.
        """
        self._waited_for(leave=0)

    def discard(self) -> None:
        """Waits for the step that was started, which nobody wants any more and which is not counted, and counts the
        others. ``prefill`` must follow.

        Raises:
            EngineError: it does not end.
        """
        if self._hostless is not None:
            if self._hostless.steps.num_open:
                self._length = None
            self._hostless.discard()
            self._hostless.flush()

    def flush(self) -> None:
        """``wait``; and counts the last step, which is otherwise done while the next one runs."""
        self.wait()
        if self._hostless is not None:
            self._hostless.flush()

    def close(self) -> None:
        """Frees the graph, the KV cache and the mailboxes. Idempotent."""
        if self._unusable is None:
            self._unusable = "the runner is closed"
        if self._hostless is not None:
            self._hostless.close()
        self._graph = self._logits = self._cache = self._length = self._hostless = None

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise EngineError(self._unusable)

    def _check_can_step(self) -> int:
        """Tokens in the KV cache."""
        self._check_usable()
        if self._length is None:
            raise EngineError("the runner has no sequences to continue; call prefill first")
        return self._length

    def _fixed(self) -> FixedCache:
        assert self._cache is not None
        return self._cache

    def _set_length(self, length: int) -> None:
        self._length = length
        self._positions.fill_(length)

    def _prepare(self) -> None:
        """Builds the experts' path, compiles its kernels by running them, then captures a step."""
        length = self._check_can_step()
        self._hostless = HostlessSteps(self._model, self._bucket, self._watchdog_s)
        if not self._use_graph:
            return
        ids = self._ids.clone()
        for _ in range(WARM_UP_STEPS):
            self._start_step(learn=False)
            self.wait()
            self._set_length(length)
        self._graph = self._hostless.capture(self._forward)
        self._set_length(length)
        self._ids.copy_(ids)

    def _start_step(self, learn: bool = True) -> None:
        hostless, length = self._prepared(), self._check_can_step()
        enqueue = self._graph.replay if self._graph is not None else hostless.hostless(self._forward)

        def work() -> None:
            self._length = None  # until it has gone well
            enqueue()

        try:
            hostless.start(work, self.rows, learn)
        except BaseException:
            self._unusable = hostless.given_up
            raise
        self._length = length + 1

    def _waited_for(self, leave: int) -> None:
        if self._hostless is None:
            return
        try:
            self._hostless.wait(leave)
        except BaseException:
            self._length = None
            self._unusable = self._hostless.given_up
            raise

    def _prepared(self) -> HostlessSteps:
        if self._hostless is None:
            raise EngineError(self._unusable or "the runner has not been prepared; call prefill first")
        return self._hostless

    def _forward(self) -> None:
        """One step on the device, from ``_ids`` and ``_positions`` to ``_logits`` and the next ``_ids``."""
        logits = self._model(
            input_ids=self._ids,
            position_ids=self._positions,
            use_cache=True,
            **{self._cache_name: self._cache},
        ).logits[:, -1]
        if self._logits is None:
            self._logits = torch.empty_like(logits)
        self._logits.copy_(logits)
        self._ids.copy_(logits.argmax(-1, keepdim=True))
        self._positions.add_(1)
