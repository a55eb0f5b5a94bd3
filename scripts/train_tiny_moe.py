#!/usr/bin/env python3
"""Build the tiny MoE example model: prepare the corpus, train, and sample.

    python scripts/train_tiny_moe.py prepare --data .train
    python scripts/train_tiny_moe.py train --data .train --out examples/tiny-moe
    python scripts/train_tiny_moe.py sample --model examples/tiny-moe

``prepare`` needs a Debian system with network access (see ``tiny_moe_data.py``); ``train`` runs on one GPU,
or for a few steps on a CPU; ``sample`` prints continuations of a few prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tiny_moe_data
import torch
import torch.nn.functional as F
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

FAST_EXPERTS = "grouped_mm_bf16"
EXPERT_CHOICES = (FAST_EXPERTS, "grouped_mm", "eager")
WINDOW_LENGTHS = (256, 1024, 1024, 2048)
EVAL_LENGTH = 1024
PROMPTS = ("In the beginning", "hacker: n.", "And it came to pass", "It is a truth universally acknowledged,")
QUESTIONS = ("Hello", "Define: hacker", "Continue: The LORD is my shepherd; I shall not want.")


@dataclass
class Settings:
    """Hyperparameters of one training run."""

    steps: int = 8000
    minutes: float = 3.4
    batch_tokens: int = 32768
    lr: float = 5e-3
    warmup: int = 300
    weight_decay: float = 0.1
    balance_coef: float = 0.01
    z_coef: float = 1e-4
    eval_every: int = 250
    seed: int = 0
    experts: str = "auto"
    compile: bool = False


@dataclass
class Log:
    """What a run reports: the loss curve and the facts around it."""

    facts: dict[str, object] = field(default_factory=dict)
    curve: list[dict[str, float]] = field(default_factory=list)

    def write(self, path: Path) -> None:
        """Write the log as JSON."""
        path.write_text(json.dumps({**self.facts, "curve": self.curve}, indent=1) + "\n")


def model_config(vocab_size: int, bos: int, eos: int, pad: int) -> Qwen3MoeConfig:
    """The architecture: 8 layers of 32 experts each, 4 used per token."""
    return Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=32,
        num_experts_per_tok=4,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
        max_position_embeddings=tiny_moe_data.MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.04,
        router_aux_loss_coef=0.01,
        output_router_logits=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        attn_implementation="sdpa",
    )


class Permute(torch.autograd.Function):
    """Reorder rows; the gradient is the inverse reordering, so nothing has to be accumulated."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: torch.Tensor,
        order: torch.Tensor,
        inverse: torch.Tensor,
    ) -> torch.Tensor:
        """Return ``rows[order]``."""
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Undo the permutation on the gradient."""
        (inverse,) = ctx.saved_tensors
        return grad[inverse], None, None


def grouped_mm_bf16_experts(
    self: torch.nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts as two BF16 grouped matrix products over FP32 master weights."""
    tokens, width = hidden_states.shape
    top_k = top_k_index.shape[-1]
    experts = top_k_index.reshape(-1)
    order = torch.argsort(experts.to(torch.int16))
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(self.num_experts, dtype=torch.int32, device=experts.device)
    counts = counts.index_add(0, experts, torch.ones_like(experts, dtype=torch.int32))
    ends = counts.cumsum(0, dtype=torch.int32)
    copies = hidden_states.to(torch.bfloat16).unsqueeze(1).expand(-1, top_k, -1).reshape(-1, width)
    with torch.autocast(hidden_states.device.type, enabled=False):
        gate_up = self.gate_up_proj.to(torch.bfloat16).transpose(1, 2)
        gate, up = F.grouped_mm(Permute.apply(copies, order, inverse), gate_up, offs=ends).chunk(2, dim=-1)
        down = self.down_proj.to(torch.bfloat16).transpose(1, 2)
        rows = F.grouped_mm(self.act_fn(gate) * up, down, offs=ends)
    rows = Permute.apply(rows, inverse, order).view(tokens, top_k, width)
    return (rows * top_k_weights.unsqueeze(-1)).sum(dim=1).to(hidden_states.dtype)


ALL_EXPERTS_FUNCTIONS.register(FAST_EXPERTS, grouped_mm_bf16_experts)


def router_losses(logits: tuple[torch.Tensor, ...], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Load-balancing loss (1 when balanced; mean over layers, each balanced by itself) and router z-loss."""
    stacked = torch.stack([layer.float() for layer in logits])
    probabilities = stacked.softmax(-1)
    chosen = torch.zeros_like(probabilities).scatter_(-1, probabilities.topk(top_k, dim=-1).indices, 1.0)
    experts = stacked.shape[-1]
    balance = experts / top_k * (chosen.mean(1) * probabilities.mean(1)).sum(-1)
    return balance.mean(), stacked.logsumexp(-1).square().mean()


def forward_loss(
    model: Qwen3MoeForCausalLM, windows: torch.Tensor, settings: Settings
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Total loss, language-model loss and balance loss of one batch of windows."""
    with torch.autocast(windows.device.type, torch.bfloat16):
        out = model.model(input_ids=windows[:, :-1], use_cache=False, output_router_logits=True)
        logits = model.lm_head(out.last_hidden_state)
    loss = F.cross_entropy(logits.float().flatten(0, 1), windows[:, 1:].flatten())
    balance, z = router_losses(out.router_logits, model.config.num_experts_per_tok)
    return loss + settings.balance_coef * balance + settings.z_coef * z, loss.detach(), balance.detach()


def random_windows(stream: torch.Tensor, batch_tokens: int, generator: np.random.Generator) -> Iterator[torch.Tensor]:
    """Yield batches of windows at random offsets, their length drawn anew for each batch."""
    while True:
        length = int(generator.choice(WINDOW_LENGTHS))
        count = max(1, batch_tokens // length)
        offsets = generator.integers(0, len(stream) - length - 1, size=count)
        starts = torch.from_numpy(offsets).to(stream.device)
        yield stream[starts[:, None] + torch.arange(length + 1, device=stream.device)].long()


def learning_rate(settings: Settings, step: int, elapsed: float) -> float:
    """Linear warm-up, then a cosine to a hundredth when steps or minutes run out, whichever is first."""
    progress = min(1.0, max(step / settings.steps, elapsed / (60 * settings.minutes)))
    cosine = 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * min(1.0, (step + 1) / settings.warmup) * cosine


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.AdamW:
    """AdamW; no weight decay on norms."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    fused = next(model.parameters()).is_cuda
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(0.9, 0.95), eps=1e-8, fused=fused)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def time_experts(model: Qwen3MoeForCausalLM, name: str, batch: torch.Tensor, settings: Settings) -> float:
    """Seconds of one forward and backward pass with an experts implementation; infinite if it fails."""
    try:
        model.set_experts_implementation(name)
        best = math.inf
        for _ in range(3):
            synchronize(batch.device)
            start = time.perf_counter()
            forward_loss(model, batch, settings)[0].backward()
            synchronize(batch.device)
            best = min(best, time.perf_counter() - start)
        return best
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as error:
        print(f"experts implementation {name} does not run here: {str(error)[:200]}", flush=True)
        return math.inf
    finally:
        model.zero_grad(set_to_none=True)


def choose_experts(model: Qwen3MoeForCausalLM, batch: torch.Tensor, settings: Settings) -> dict[str, float]:
    """Time every experts implementation, leave the fastest selected, and return the timings."""
    names = EXPERT_CHOICES if settings.experts == "auto" else (settings.experts,)
    seconds = {name: time_experts(model, name, batch, settings) for name in names}
    fastest = min(seconds, key=lambda name: seconds[name])
    if math.isinf(seconds[fastest]):
        raise RuntimeError("no experts implementation runs on this device")
    model.set_experts_implementation(fastest)
    timings = {name: round(value, 4) for name, value in seconds.items() if math.isfinite(value)}
    print(f"experts: {fastest}, seconds per pass {timings}", flush=True)
    return timings


def eval_windows(stream: np.ndarray, device: torch.device) -> torch.Tensor:
    """The stream cut into windows of one length (the remainder is dropped)."""
    length = min(EVAL_LENGTH, len(stream) - 1)
    count = (len(stream) - 1) // length
    starts = np.arange(count)[:, None] * length + np.arange(length + 1)
    return torch.from_numpy(stream.astype(np.int64)[starts]).to(device)


@torch.no_grad()
def evaluate(model: torch.nn.Module, validation: dict[str, torch.Tensor]) -> dict[str, float]:
    """Mean loss per token for each source, and over all of them."""
    model.eval()
    losses, total, tokens = {}, 0.0, 0
    for source, windows in validation.items():
        summed = 0.0
        for batch in windows.split(32):
            with torch.autocast(batch.device.type, torch.bfloat16):
                logits = model(input_ids=batch[:, :-1], use_cache=False).logits
            logits = logits.float().flatten(0, 1)
            summed += F.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum").item()
        count = windows[:, 1:].numel()
        losses[source] = round(summed / count, 4)
        total, tokens = total + summed, tokens + count
    model.train()
    return {"all": round(total / tokens, 4), **losses}


@torch.no_grad()
def expert_load(model: torch.nn.Module, validation: dict[str, torch.Tensor]) -> list[dict[str, float]]:
    """Per layer: entropy of the expert load (1 is even), and the smallest and largest share."""
    config = model.config
    counts = torch.zeros(config.num_hidden_layers, config.num_experts, dtype=torch.float64)
    for windows in validation.values():
        for batch in windows.split(32):
            with torch.autocast(batch.device.type, torch.bfloat16):
                logits = model(input_ids=batch, use_cache=False, output_router_logits=True).router_logits
            for layer, values in enumerate(logits):
                chosen = values.topk(config.num_experts_per_tok, dim=-1).indices.flatten()
                counts[layer] += torch.bincount(chosen, minlength=config.num_experts).cpu()
    shares = counts / counts.sum(1, keepdim=True)
    entropy = -(shares * shares.clamp_min(1e-12).log()).sum(1) / math.log(config.num_experts)
    lowest, highest = shares.min(1).values.tolist(), shares.max(1).values.tolist()
    rows = zip(entropy.tolist(), lowest, highest, strict=True)
    return [
        {"layer": i, "entropy": round(even, 4), "min": round(low, 4), "max": round(high, 4)}
        for i, (even, low, high) in enumerate(rows)
    ]


def optimise(
    model: Qwen3MoeForCausalLM,
    batches: Iterator[torch.Tensor],
    validate: Callable[[], dict[str, float]],
    settings: Settings,
    log: Log,
) -> dict[str, torch.Tensor]:
    """Train until steps or minutes run out; return the weights with the lowest validation loss."""
    optimizer = make_optimizer(model, settings)
    if settings.compile:
        model.model.compile()
    best_loss, best = math.inf, {}
    losses: list[torch.Tensor] = []
    start, step, seen, done = time.perf_counter(), 0, 0, False
    while not done:
        rate = learning_rate(settings, step, time.perf_counter() - start)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = next(batches)
        total, loss, balance = forward_loss(model, batch, settings)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss)
        step, seen = step + 1, seen + batch[:, 1:].numel()
        if step % 20 == 0:
            synchronize(batch.device)
        elapsed = time.perf_counter() - start
        done = step >= settings.steps or elapsed >= 60 * settings.minutes
        if done or step % settings.eval_every == 0:
            result = validate()
            mean = float(torch.stack(losses).mean())
            row = {"step": step, "tokens": seen, "seconds": round(elapsed, 1), "lr": round(rate, 6)}
            row |= {"train": round(mean, 4), "val": result["all"], "balance": round(float(balance), 4)}
            log.curve.append(row)
            print(json.dumps(row), flush=True)
            losses.clear()
            if result["all"] < best_loss:
                best_loss = result["all"]
                best = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return best


def train(data: Path, out: Path, settings: Settings) -> None:
    """Train a model on prepared data and write it, its tokenizer and its log to ``out``."""
    torch.manual_seed(settings.seed)
    torch.set_float32_matmul_precision("high")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(data / "tokenizer")
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    model = Qwen3MoeForCausalLM(model_config(len(tokenizer), *ids)).to(device)
    stream = torch.from_numpy(np.load(data / "train.npy").astype(np.int32)).to(device)
    validation = {p.stem[4:]: eval_windows(np.load(p), device) for p in sorted(data.glob("val_*.npy"))}
    if device.type == "cpu":
        validation = {source: windows[:2, :257] for source, windows in validation.items()}
    batches = random_windows(stream, settings.batch_tokens, np.random.default_rng(settings.seed))

    log = Log()
    log.facts["settings"] = dict(vars(settings))
    log.facts["machine"] = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    log.facts["versions"] = {"torch": torch.__version__, "transformers": transformers.__version__}
    log.facts["parameters"] = sum(p.numel() for p in model.parameters())
    log.facts["corpus"] = json.loads((data / "meta.json").read_text())
    log.facts["seconds_per_pass"] = choose_experts(model, next(batches), settings)
    best = optimise(model, batches, lambda: evaluate(model, validation), settings, log)

    model.load_state_dict(best)
    model = model.to(torch.bfloat16).eval()
    log.facts["final_val"] = evaluate(model, validation)
    log.facts["expert_load"] = expert_load(model, validation)
    print(json.dumps(log.facts["final_val"]), json.dumps(log.facts["expert_load"]), flush=True)
    save(model, data / "tokenizer", out)
    log.write(out / "training_log.json")


def save(model: Qwen3MoeForCausalLM, tokenizer: Path, out: Path) -> None:
    """Write weights, configuration, generation settings and tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    model.set_experts_implementation("eager")
    model.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        max_new_tokens=160,
    )
    model.save_pretrained(out)
    path = out / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config.pop("num_local_experts", model.config.num_experts)  # the name released models use
    path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    (out / "model.safetensors").chmod(0o644)
    for path in sorted(tokenizer.iterdir()):
        shutil.copy(path, out / path.name)


@torch.no_grad()
def sample(folder: Path, new_tokens: int) -> None:
    """Print greedy continuations of the prompts, and answers to the questions."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    texts = list(PROMPTS)
    for question in QUESTIONS:
        turn = [{"role": "user", "content": question}]
        texts.append(tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True))
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False, return_token_type_ids=False)
        for label, options in (
            ("greedy", {"do_sample": False}),
            ("sampled", {"temperature": 0.7, "top_p": 0.9}),
        ):
            torch.manual_seed(0)
            ids = model.generate(**inputs, max_new_tokens=new_tokens, **options)[0]
            ended = bool(ids[-1] == tokenizer.eos_token_id)
            print(f"--- {label} (ended: {ended})\n{tokenizer.decode(ids)}\n", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    prepare = commands.add_parser("prepare", help="fetch the texts, train the tokenizer, write token streams")
    prepare.add_argument("--data", type=Path, default=Path(".train"))
    prepare.add_argument("--vocab-size", type=int, default=4096)
    training = commands.add_parser("train", help="train and write the model")
    training.add_argument("--data", type=Path, default=Path(".train"))
    training.add_argument("--out", type=Path, required=True)
    for name, value in vars(Settings()).items():
        option = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            training.add_argument(option, action="store_true")
        else:
            training.add_argument(option, type=type(value), default=value)
    sampling = commands.add_parser("sample", help="print text that a trained model generates")
    sampling.add_argument("--model", type=Path, default=Path("examples/tiny-moe"))
    sampling.add_argument("--new-tokens", type=int, default=100)
    args = parser.parse_args()
    if args.command == "prepare":
        tiny_moe_data.prepare(args.data, args.vocab_size)
    elif args.command == "train":
        train(args.data, args.out, Settings(**{name: getattr(args, name) for name in vars(Settings())}))
    else:
        sample(args.model, args.new_tokens)


if __name__ == "__main__":
    main()
