"""Every family against stock transformers on the same weights: logits and greedy tokens."""

import pytest
import torch

import greenroom
from greenroom.engine.offload import offload_of
from tests.engine.offloaded import left_padded, offloaded, random_ids, saved_family
from tests.reference.families import FAMILIES

DEVICE = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
POLICIES = ["lru", "lfu", "lfru", "first-come"]
NEW_TOKENS = 8


def sizes_of(num_experts: int, top_k: int) -> list[int]:
    return [0, 1, top_k, num_experts]


def greedy(model, **inputs):
    inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
    out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return out.cpu()


@torch.no_grad()
def logits(model, **inputs):
    return model(**{name: tensor.to(model.device) for name, tensor in inputs.items()}).logits.float().cpu()


@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("family", FAMILIES)
def test_family_equals_stock(family, device):
    with saved_family(family) as (stock, folder):
        stock.to(device)
        prompt, long = random_ids(1, 7), random_ids(2, 70, seed=1)
        padded = left_padded(8, 9)
        expected = {
            "logits": logits(stock, input_ids=long),
            "one": greedy(stock, input_ids=prompt),
            "batch": greedy(stock, **padded),
        }
        spec_sizes = None
        for number, policy in enumerate(POLICIES):
            size = spec_sizes[number] if spec_sizes else 0
            with offloaded(folder, cache_expert_num=size, policy=policy, device=device) as model:
                spec = offload_of(model).spec
                spec_sizes = sizes_of(spec.layers[0].num_experts, 3)
                torch.testing.assert_close(logits(model, input_ids=long), expected["logits"], rtol=1e-4, atol=1e-4)
                assert (greedy(model, input_ids=prompt) == expected["one"]).all(), f"size {size}, {policy}"
                assert (greedy(model, **padded) == expected["batch"]).all(), f"size {size}, {policy}"
                offload_of(model).manager.check_invariants()
                total = greenroom.stats(model).total
                assert total.hits + total.misses > 0
                assert (total.hits == 0) == (size == 0)
                if size == spec.layers[0].num_experts:
                    assert total.misses == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", DEVICE)
@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_no_worse_than_stock(family, device, dtype):
    """Held against the same weights run in float32: our error may not exceed stock's by much.

    The median over the tokens of many short prompts, since a token whose router is undecided takes
    another expert at the slightest rounding, in stock's run or in ours, and takes the rest of its
    prompt with it.
    """

    def median_error(of, exact):
        return (of - exact).pow(2).mean(-1).sqrt().median()

    with saved_family(family, dtype) as (stock, folder):
        prompt = random_ids(24, 4)
        stock.to(device)
        rounded = logits(stock, input_ids=prompt)
        exact = logits(stock.float(), input_ids=prompt)
        with offloaded(folder, cache_expert_num=3, device=device) as model:
            assert model.dtype == dtype
            error = median_error(logits(model, input_ids=prompt), exact)
        assert error <= 1.3 * median_error(rounded, exact) + 1e-3


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("size", [0, 1, 4, 16])
def test_every_size_policy_and_thread_count_gives_the_same_bits(shared_qwen3, size, policy, threads):
    folder, ids, expected = shared_qwen3
    knobs = {"cache_expert_num": size, "policy": policy, "context_num_threads": threads}
    with offloaded(folder, device="cpu", **knobs) as model:
        assert torch.equal(logits(model, input_ids=ids), expected)


@pytest.fixture(scope="module")
def shared_qwen3():
    with saved_family("qwen3_moe", torch.bfloat16) as (_, folder):
        ids = random_ids(3, 40)
        with offloaded(folder, cache_expert_num=0, context_num_threads=1, device="cpu") as model:
            expected = logits(model, input_ids=ids)
        yield folder, ids, expected
