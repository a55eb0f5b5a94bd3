"""Queries, keys and values by one product, against three of them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from greenroom.engine.fused_projections import fuse_projections
from tests.reference.families import FAMILIES, make_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Attention(nn.Module):
    def __init__(self, bias: bool = False, width: int = 24) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, out, bias=bias) for out in (32, 8, 16))

    def forward(self, hidden):
        return self.q_proj(hidden), self.k_proj(hidden), self.v_proj(hidden)


def expected(module: Attention, hidden: torch.Tensor) -> list[torch.Tensor]:
    return [F.linear(hidden, part.weight, part.bias) for part in (module.q_proj, module.k_proj, module.v_proj)]


def check(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (2, 5), (7, 40)])
@torch.no_grad()
def test_results_and_parameters_are_as_before(bias, shape, monkeypatch):
    module = Attention(bias).to(DEVICE)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert fuse_projections(module) == 1
    after = module.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert len({tensor.untyped_storage().data_ptr() for tensor in after.values()}) == 1 + bias
    products = []
    real = F.linear
    monkeypatch.setattr(F, "linear", lambda *args: (products.append(args[1].shape[0]), real(*args))[1])
    hidden = torch.randn(*shape, 24, device=DEVICE)
    found = module(hidden)
    assert products == ([56] if shape[0] * shape[1] <= 64 else [32, 8, 16])
    check(found, expected(module, hidden))
    assert found[0].view(*shape, -1, 8).shape == (*shape, 4, 8), "as models divide it into heads"


@torch.no_grad()
def test_calls_in_any_order_and_with_any_input():
    module = Attention().to(DEVICE)
    fuse_projections(module)
    first, second = torch.randn(2, 2, 24, device=DEVICE)
    one, two = expected(module, first), expected(module, second)
    check([module.q_proj(first), module.k_proj(second), module.v_proj(first)], [one[0], two[1], one[2]])
    check([module.v_proj(first), module.v_proj(first)], [one[2], one[2]])
    check([module.k_proj(second), module.q_proj(second), module.q_proj(first)], [two[1], two[0], one[0]])
    check([module.v_proj(second), module.k_proj(second)], [two[2], two[1]])
    equal = first.clone()
    module.q_proj(first)
    check([module.k_proj(equal)], [one[1]])


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_changed_weights_are_seen(bias):
    module = Attention(bias).to(DEVICE)
    fuse_projections(module)
    hidden = torch.randn(1, 24, device=DEVICE)
    module.k_proj.weight.mul_(2)
    module.load_state_dict(module.state_dict() | {"v_proj.weight": torch.ones(16, 24)})
    check(module(hidden), expected(module, hidden))
    if bias:
        module.v_proj.bias = nn.Parameter(torch.randn(16, device=DEVICE))
    else:
        module.k_proj.weight = nn.Parameter(torch.randn(8, 24, device=DEVICE))
    check(module(hidden), expected(module, hidden))
    check(module.double()(hidden.double()), expected(module, hidden.double()))


def test_gradients_flow_through_three_products():
    module = Attention().to(DEVICE)
    fuse_projections(module)
    hidden = torch.randn(1, 24, device=DEVICE, requires_grad=True)
    sum(part.sum() for part in module(hidden)).backward()
    wanted = sum(part.weight.sum(0) for part in (module.q_proj, module.k_proj, module.v_proj))
    torch.testing.assert_close(hidden.grad[0], wanted)


def test_what_does_not_fit_is_left_alone():
    mixed, tied, taken, odd = Attention(), Attention(), Attention(), Attention()
    mixed.k_proj = nn.Linear(24, 8)  # with a bias
    tied.q_proj = nn.Linear(24, 16, bias=False)
    tied.q_proj.weight = tied.v_proj.weight
    taken.q_proj.forward = lambda hidden: hidden
    odd.v_proj = nn.Identity()
    assert fuse_projections(nn.ModuleList([mixed, tied, taken, odd, nn.Linear(3, 4)]).to(DEVICE)) == 0


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_fused_model_gives_the_stock_models_logits(family):
    stock, fused = (make_model(family).to(DEVICE) for _ in range(2))
    count = fuse_projections(fused)
    if family in ("qwen3_moe", "mixtral", "gpt_oss", "qwen2_moe"):
        assert count == stock.config.num_hidden_layers
    ids = torch.randint(3, 100, (2, 9), device=DEVICE)
    torch.testing.assert_close(fused(ids).logits, stock(ids).logits, rtol=1e-4, atol=1e-4)
    options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    expected, result = stock.generate(ids, **options), fused.generate(ids, **options)
    for ours, theirs in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
