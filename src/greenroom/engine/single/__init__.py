"""Decode of one sequence on a CPU: what the CPU engine does of a pass with one token, instead of torch.

torch's operations each take longer to begin than a token's numbers to compute, and their threads and the engine's want
the same cores. Weights are read by the engine's threads; what lies between products is computed by the thread that runs
the model.
"""

from transformers import PreTrainedModel

from greenroom.engine.cache_argument import why_no_plain_cache
from greenroom.engine.single.attention import SingleAttention
from greenroom.engine.single.linears import take_linears
from greenroom.engine.single.parts import take_norms, take_rope, take_routers
from greenroom.engine.single.passes import SinglePass
from greenroom.experts.cpu import CpuExperts


def take_single_passes(model: PreTrainedModel, engine: CpuExperts) -> None:
    """Has ``engine`` do what it can of passes with one token of one sequence.

    Not in passes over packed sequences, also of a single one: there a text must not depend, by a single bit, on what is
    served beside it. One thread at a time, the one that runs the model.
    """
    # Models with other caches ask for sdpa by its name in places.
    attention = SingleAttention(model, engine) if why_no_plain_cache(model) is None else None
    single = SinglePass(model, attention)
    take_linears(model, engine, single)
    take_norms(model, engine.isa, single)
    take_rope(model, engine.isa, single)
    take_routers(model, engine, single)
