"""Weights that are not experts in host memory: logits and tokens equal those without, in every family."""

import pytest
import torch

import greenroom
from greenroom.engine import request as request_module
from greenroom.engine.offload import offload_of
from greenroom.errors import ConfigError, EngineError
from greenroom.weights.base import NoWeightOffload
from greenroom.weights.prefetch import PrefetchOffload
from tests.engine.offloaded import offloaded, random_ids, saved_family
from tests.reference.families import FAMILIES
from tests.weights.late_copies import LateCopies

CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
LAYERS = 5
SELECTIONS = {
    "every layer, one buffer": {"group_size": 1},
    "five layers, two buffers": {"group_size": 1, "prefetch_step": 2},
    "five layers, three buffers": {"group_size": 1, "prefetch_step": 3},
    "more buffers than layers": {"group_size": 1, "prefetch_step": 7},
    "the last of each two": {"group_size": 2, "prefetch_step": 2},
    "the last two of each three": {"group_size": 3, "num_in_group": 2, "prefetch_step": 2},
    "attention": {"group_size": 1, "params": "self_attn", "prefetch_step": 2},
    "the router": {"group_size": 1, "params": r"mlp\.gate"},
    "one buffer, layers in between": {"group_size": 2},
    "copied at the begin of a pass": {"group_size": 1, "params": r"layers\.(2|4)\.self_attn"},
}


def knobs(**settings):
    return {f"weights_offload_{name}": value for name, value in settings.items()}


@pytest.fixture
def late(monkeypatch):
    """On the CPU, copies at their worst; the list of them."""
    made = []

    def make(selection, device, pin_memory=True):
        copies = LateCopies()
        made.append(copies)
        return PrefetchOffload(selection, device, copies, least_piece=1)

    monkeypatch.setattr(request_module, "make_weight_offloader", make)
    return made


@pytest.fixture
def in_pieces(monkeypatch):
    """Units are copied in as many pieces as there are layers for them, however small."""

    def make(selection, device, pin_memory=True):
        return PrefetchOffload(selection, device, least_piece=1) if selection.units else NoWeightOffload()

    monkeypatch.setattr(request_module, "make_weight_offloader", make)


@torch.no_grad()
def logits(model, ids):
    return model(ids.to(model.device)).logits.float().cpu()


def greedy(model, ids, count=8):
    out = model.generate(ids.to(model.device), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return out.cpu()


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_equals_itself_without(family, late):
    """With garbage in a buffer from when its copy may begin until it is waited for."""
    ids = random_ids(2, 7)
    with saved_family(family) as (stock, folder):
        expected, tokens = logits(stock, ids), greedy(stock, ids, 4)
        patterns = [None, "attn|attention|mixer"]
        for params in patterns:
            chosen = knobs(group_size=1, params=params, prefetch_step=1)
            with offloaded(folder, device="cpu", **chosen) as model:
                torch.testing.assert_close(logits(model, ids), expected, rtol=1e-4, atol=1e-4)
                assert (greedy(model, ids, 4) == tokens).all()
                assert late[-1].started > 0
                offload_of(model).weights.check()


@pytest.mark.parametrize("family", ["deepseek_v3", "ernie4_5_moe", "gpt_oss", "nemotron_h", "qwen3_next", "gemma4"])
def test_half_precision_keeps_every_bit(family, late):
    """Families that keep some parameters wider than the rest among them."""
    ids = random_ids(2, 7)
    with saved_family(family, torch.bfloat16) as (_, folder):
        with offloaded(folder, device="cpu") as model:
            expected = logits(model, ids)
        with offloaded(folder, device="cpu", **knobs(group_size=1, prefetch_step=2)) as model:
            assert torch.equal(logits(model, ids), expected)
            dtypes = {parameter.dtype for parameter in model.parameters()}
            assert torch.bfloat16 in dtypes


@pytest.fixture(scope="module")
def five_layers(tmp_path_factory):
    """A model of five layers, in float32 so that a GPU's sums may be compared with the CPU's."""
    from transformers import Qwen3MoeForCausalLM

    from tests.reference.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("five")
    config = FAMILIES["qwen3_moe"]()
    config.num_hidden_layers = LAYERS
    config.layer_types = None
    torch.manual_seed(0)
    stock = Qwen3MoeForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in stock.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.2)
    stock.generation_config.eos_token_id = None
    stock.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return stock, folder


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("name", SELECTIONS)
def test_every_selection_equals_stock(five_layers, name, device, in_pieces):
    stock, folder = five_layers
    ids = random_ids(2, 9)
    with offloaded(folder, device=device, cache_expert_num=4, **knobs(**SELECTIONS[name])) as model:
        for _ in range(3):
            torch.testing.assert_close(logits(model, ids), logits(stock, ids), rtol=1e-4, atol=1e-4)
        assert (greedy(model, ids) == greedy(stock, ids)).all()
        offload = offload_of(model)
        offload.weights.check()
        stats = greenroom.stats(model)
        selection = offload.weights.selection
        assert stats.weights_offload == "prefetch"
        assert stats.weights_host_bytes == selection.host_bytes > 0
        assert stats.weights_device_bytes == selection.device_bytes
        assert offload.plan.other_bytes == offload.spec.other_bytes - selection.weight_bytes + selection.device_bytes


def test_a_failed_pass_and_a_closed_model(five_layers, late):
    stock, folder = five_layers
    ids = random_ids(1, 5)
    with offloaded(folder, device="cpu", **knobs(group_size=1, prefetch_step=2)) as model:
        broken = model.model.layers[3].mlp
        forward, broken.forward = broken.forward, lambda *_: 1 / 0
        with pytest.raises(ZeroDivisionError):
            model(ids)
        broken.forward = forward
        offload_of(model).weights.check()
        torch.testing.assert_close(logits(model, ids), logits(stock, ids), rtol=1e-4, atol=1e-4)
        greenroom.close(model)
        greenroom.close(model)
        assert model.model.layers[0].self_attn.q_proj.weight.numel() == 0


def test_moved_weights_are_refused(five_layers):
    _, folder = five_layers
    with offloaded(folder, device="cpu", **knobs(group_size=1)) as model:
        model.to(torch.float64)
        with pytest.raises(EngineError, match="moved or converted"):
            model(random_ids(1, 4))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"group_size": 9}, "no layer is offloaded"),
        ({"backend": "uva"}, "the uva backend lets a GPU read host memory"),
        ({"prefetch_step": 1}, "no effect without offloaded weights"),
        ({"group_size": 1, "params": "experts"}, "experts do not count"),
    ],
)
def test_refused_before_anything_is_loaded(five_layers, settings, sentence, monkeypatch):
    _, folder = five_layers
    with pytest.raises(ConfigError, match=sentence):
        greenroom.load(folder, progress=False, device="cpu", **knobs(**settings))


def test_without(five_layers):
    _, folder = five_layers
    with offloaded(folder, device="cpu") as model:
        assert greenroom.stats(model).weights_offload == "none"
        assert offload_of(model).weights.selection.units == ()


def test_batches_over_a_paged_cache(late):
    """Prompts and single tokens of several sequences in one pass."""
    from greenroom.engine.runners import make_runner
    from tests.engine.paged.driver import Traffic

    with saved_family("qwen2_moe") as (stock, folder):
        chosen = knobs(group_size=1, params="self_attn|shared", prefetch_step=2)
        with offloaded(folder, device="cpu", cache_expert_num=4, **chosen) as model:
            runner = make_runner(model, num_blocks=40, block_size=4, max_tokens=128, max_context=48)
            traffic = Traffic(runner, stock, seed=0)
            for _ in range(6):
                traffic.step(most=4)
                offload_of(model).weights.check()
            runner.close()
            assert late[0].started > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on a CPU device need Triton's interpreter")
@pytest.mark.parametrize("step", [1, 2])
def test_steps_of_a_runner(late, step):
    """Through Triton's interpreter, three steps: the runner needs to know nothing of it."""
    pytest.importorskip("triton")
    from greenroom.engine.step_runner import StepRunner

    with saved_family("mixtral") as (stock, folder):
        ids = random_ids(1, 4)
        with offloaded(folder, device="cpu", **knobs(group_size=1, params="attn|gate", prefetch_step=step)) as model:
            runner = StepRunner(model, 1, 16)
            token = runner.prefill(ids).argmax(-1, keepdim=True)
            for _ in range(3):
                ids = torch.cat([ids, token], 1)
                found = runner.step(token)
                torch.testing.assert_close(found, logits(stock, ids)[:, -1], rtol=1e-4, atol=1e-4)
                token = found.argmax(-1, keepdim=True)
                offload_of(model).weights.check()
            runner.close()


@pytest.mark.parametrize(
    ("settings", "units"),
    [({}, 0), ({"group_size": 1, "params": "self_attn"}, 5), ({"group_size": 5, "params": "self_attn"}, 0)],
)
def test_the_split_counts_what_else_crosses(five_layers, settings, units):
    """In experts a layer, the mean of all. A single layer's weights stay in their buffer."""
    pytest.importorskip("triton")
    from greenroom.engine.step_runner import StepRunner

    with offloaded(five_layers[1], device="cpu", **knobs(**settings)) as model:
        runner = StepRunner(model, 1, 16)
        runner.prefill(random_ids(1, 4))
        offload = offload_of(model)
        expert = offload.spec.layers[0].format.block_bytes
        unit = offload.weights.selection.slot_bytes
        assert runner.steps.split.link_load == pytest.approx(units * unit / LAYERS / expert)
        runner.close()


@pytest.mark.cuda
@pytest.mark.parametrize("settings", [{"backend": "uva"}, {"backend": "uva", "params": "embed_tokens|self_attn"}])
def test_uva_equals_stock(five_layers, settings):
    stock, folder = five_layers
    ids = random_ids(2, 9)
    with offloaded(folder, device="cuda", cache_expert_num=4, **knobs(**settings)) as model:
        weight = model.model.layers[0].self_attn.q_proj.weight
        assert weight.is_cuda
        assert weight.data_ptr() != 0
        torch.testing.assert_close(logits(model, ids), logits(stock, ids), rtol=1e-4, atol=1e-4)
        assert (greedy(model, ids) == greedy(stock, ids)).all()


@pytest.mark.cuda
@pytest.mark.parametrize("name", SELECTIONS)
def test_graph_replay_equals_none_over_50_steps(five_layers, name, in_pieces):
    _decode_50_steps(five_layers, SELECTIONS[name])


@pytest.mark.cuda
def test_uva_in_a_graph_over_50_steps(five_layers):
    _decode_50_steps(five_layers, {"backend": "uva"})


def _decode_50_steps(five_layers, settings):
    """Tokens of captured steps, with eager passes in between, some of which fail."""
    from greenroom.engine.step_runner import StepRunner

    _, folder = five_layers
    ids = random_ids(2, 6).cuda()
    expected, found = [], []
    for tokens, chosen in ((expected, {}), (found, knobs(**settings))):
        with offloaded(folder, device="cuda", cache_expert_num=4, **chosen) as model:
            runner = StepRunner(model, 2, 64)
            token = runner.prefill(ids).argmax(-1, keepdim=True)
            for step in range(50):
                tokens.append(token.cpu())
                token = runner.step(token).argmax(-1, keepdim=True)
                if step % 9 == 4:
                    logits(model, random_ids(1, 5))
                if step % 9 == 7:
                    broken = model.model.layers[3].mlp
                    own, broken.forward = broken.forward, lambda *_: 1 / 0
                    with pytest.raises(ZeroDivisionError):
                        logits(model, random_ids(1, 5))
                    broken.forward = own
            runner.close()
    assert torch.equal(torch.cat(found, 1), torch.cat(expected, 1))
