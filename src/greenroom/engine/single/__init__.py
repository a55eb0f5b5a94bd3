"""On a CPU: what the CPU engine and its library do instead of torch, in decode above all.

torch's operations each take longer to begin than a token's numbers to compute, and their threads and the engine's want
the same cores. Weights are read by the engine's threads; what lies between products is computed by the thread that runs
the model.
"""

from transformers import PreTrainedModel

from greenroom.engine.cache_argument import why_no_plain_cache
from greenroom.engine.single.attention import SingleAttention
from greenroom.engine.single.layers import take_layers
from greenroom.engine.single.linears import take_linears, torch_multiplies
from greenroom.engine.single.parts import take_norms, take_rope, take_routers
from greenroom.engine.single.passes import EnginePass
from greenroom.experts.cpu import CpuExperts
from greenroom.experts.native import Isa


def take_single_passes(model: PreTrainedModel, engine: CpuExperts) -> None:
    """Has ``engine`` do what it can of passes with one token of one sequence, and a part of packed ones.

    In those a text must not depend, by a single bit, on what is served beside it, nor on how it is divided into passes.
    So they get only what treats each row by itself and always the same way: norms, rotary embedding, routers' choices
    and the head; and the other dense layers if it is the engine that multiplies those of all passes, where torch has no
    kernels for the model's dtype. One thread at a time, the one that runs the model.
    """
    # Models with other caches ask for sdpa by its name in places.
    attention = SingleAttention(model, engine) if why_no_plain_cache(model) is None else None
    always = engine.isa is not Isa.PORTABLE and not torch_multiplies(model.dtype)
    passing = EnginePass(model, attention, always)
    take_linears(model, engine, passing)
    take_norms(model, engine.isa, passing)
    take_rope(model, engine.isa, passing)
    take_routers(model, engine, passing)
    if attention is not None:
        take_layers(model, engine, passing)
