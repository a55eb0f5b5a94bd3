"""Which tensors of a checkpoint are routed experts, and where each of them goes. Pure functions of names.

Checkpoints of one family differ: the hub's originals mostly keep a tensor for every expert and projection,
what transformers saves itself may hold one tensor for all experts of a layer, and prefixes differ between a
model and its multimodal or older self. So a tensor is placed by its layer's number and by the end of its
name, and the rest of the name only has to be consistent.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum

from greenroom.engine.safetensors_header import TensorEntry
from greenroom.engine.spec import ExpertLayerSpec, ModelSpec
from greenroom.errors import CheckpointError, UnsupportedModelError
from greenroom.experts.formats import SUPPORTED_DTYPES


class Part(StrEnum):
    """What an expert's tensor is. GATE_UP holds the gate's rows and the up projection's."""

    GATE = "gate"
    UP = "up"
    GATE_UP = "gate_up"
    DOWN = "down"
    GATE_BIAS = "gate_bias"
    UP_BIAS = "up_bias"
    GATE_UP_BIAS = "gate_up_bias"
    DOWN_BIAS = "down_bias"


@dataclass(frozen=True)
class ExpertPiece:
    """One checkpoint tensor that holds (a part of) routed experts.

    Attributes:
        name: the tensor's name in the checkpoint.
        layer: index into ``ModelSpec.layers``.
        expert: the expert that it belongs to; None for a tensor whose first dimension counts all experts.
        transposed: a weight stored as [in, out] instead of [out, in].
        interleaved: gate and up rows alternate.
    """

    name: str
    layer: int
    expert: int | None
    part: Part
    transposed: bool = False
    interleaved: bool = False


@dataclass(frozen=True)
class ExpertPlacements:
    """The pieces of each layer, in the order of ``ModelSpec.layers``. They hold every expert once."""

    layers: tuple[tuple[ExpertPiece, ...], ...]

    def __iter__(self) -> Iterator[ExpertPiece]:
        return (piece for pieces in self.layers for piece in pieces)


_ONE_EXPERT = {
    "gate_proj.weight": Part.GATE,
    "up_proj.weight": Part.UP,
    "down_proj.weight": Part.DOWN,
    "gate_proj.bias": Part.GATE_BIAS,
    "up_proj.bias": Part.UP_BIAS,
    "down_proj.bias": Part.DOWN_BIAS,
    "w1.weight": Part.GATE,
    "w3.weight": Part.UP,
    "w2.weight": Part.DOWN,
    "w1.bias": Part.GATE_BIAS,
    "w3.bias": Part.UP_BIAS,
    "w2.bias": Part.DOWN_BIAS,
}
"""Ends of ``experts.<e>.<end>``: the second half is mixtral's and minimax_m2's."""
_ALL_EXPERTS = {
    "gate_up_proj": Part.GATE_UP,
    "up_proj": Part.UP,
    "down_proj": Part.DOWN,
    "gate_up_proj_bias": Part.GATE_UP_BIAS,
    "up_proj_bias": Part.UP_BIAS,
    "down_proj_bias": Part.DOWN_BIAS,
}
"""Ends of ``experts.<end>``, as transformers stores them: in the orientation that the module declares."""
_GRANITE = {"input_linear.weight": Part.GATE_UP, "output_linear.weight": Part.DOWN}
"""Ends of ``block_sparse_moe.<end>``. granitemoeshared's ``shared_mlp.input_linear`` is not among them."""
_WEIGHTS = (Part.GATE, Part.UP, Part.GATE_UP, Part.DOWN)

_EXPERTS = r"(?:[\w.]*\.)?(?:experts\.(?!e_score_correction_bias)|block_sparse_moe\.(?=(?:in|out)put_linear\.))"
"""The path of a layer's experts, as a whole segment of it: ``shared_experts`` are not routed."""
_NAME = re.compile(rf"(?P<prefix>(?:.*?\.)?)layers\.(?P<layer>\d+)\.(?P<path>{_EXPERTS})(?P<end>.+)")
_MTP = re.compile(r"(?:^|\.)mtp\.")
"""Draft layers for multi-token prediction. They number from 0 again and so look like the model's own."""
_QUANTISED = (
    (r"_scale_inv$", "FP8 in blocks"),
    (r"_proj_(blocks|scales)$", "MXFP4"),
    (r"\.(qweight|qzeros|scales|g_idx)$", "GPTQ or AWQ INT4"),
    (r"\.weight_scale_2$", "NVFP4"),
    (
        r"\.weight_(packed|scale|shape|g_idx|zero_point|global_scale)$|\.input_(global_)?scale$",
        "compressed-tensors",
    ),
    (r"\.(absmax|quant_map|SCB|quant_state\..*)$", "bitsandbytes"),
)
"""Ends of names that give a format away. The first that any tensor of a layer matches is named."""


@dataclass(frozen=True)
class _Found:
    """A tensor below some layer's experts module. ``end`` is what follows the module's name."""

    name: str
    prefix: str
    layer: int
    path: str
    end: str


def place_experts(
    entries: Mapping[str, TensorEntry], spec: ModelSpec, ignore: Iterable[str | re.Pattern[str]] = ()
) -> ExpertPlacements:
    """Finds the tensors that hold the routed experts of ``spec``, each expert exactly once.

    Args:
        entries: all tensors of the checkpoint by name.
        ignore: regular expressions of names that the model ignores where it does not know them
            (transformers' ``_keys_to_ignore_on_load_unexpected``). A name that the model does know is never
            ignored: glm4_moe's pattern for one model's draft layer is another's ordinary layer.

    Raises:
        CheckpointError: a tensor is missing, or two hold the same weights.
        UnsupportedModelError: the experts are quantised, or hold what greenroom does not know.
    """
    numbers = {(_prefix(layer), layer.layer): index for index, layer in enumerate(spec.layers)}
    if len(numbers) < len(spec.layers):
        raise UnsupportedModelError("a model with two sets of routed experts in one layer is not supported")
    found = _select(filter(None, map(_parse, entries)), spec, [re.compile(pattern) for pattern in ignore])
    by_layer: list[list[_Found]] = [[] for _ in spec.layers]
    for item in found:
        by_layer[numbers[item.prefix, item.layer]].append(item)
    for items in by_layer:
        _refuse_quantised(items, entries)
    return ExpertPlacements(
        tuple(tuple(_place_layer(index, spec.layers[index], items, entries)) for index, items in enumerate(by_layer))
    )


def is_expert_key(name: str, spec: ModelSpec) -> bool:
    """Whether a tensor called ``name`` belongs to routed experts of ``spec``, whatever its layout."""
    return any(re.search(pattern, name) for pattern in expert_key_patterns(spec))


def expert_key_patterns(spec: ModelSpec) -> tuple[str, ...]:
    """Regular expressions (for ``re.search``) of all names that routed experts of ``spec`` can have.

    They match the names in every checkpoint layout, the names of the module's own parameters and those of
    quantised weights, but no draft layer's, router's or shared expert's.
    """
    numbers = "|".join(str(number) for number in sorted({layer.layer for layer in spec.layers}))
    return (rf"^(?!(?:.*\.)?mtp\.)(?:.*\.)?layers\.(?:{numbers})\.{_EXPERTS}",)


def _parse(name: str) -> _Found | None:
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    return _Found(name, match["prefix"], int(match["layer"]), match["path"], match["end"])


def _prefix(layer: ExpertLayerSpec) -> str:
    return re.split(r"\blayers\.\d+\b", layer.name, maxsplit=1)[0]


def _select(items: Iterable[_Found], spec: ModelSpec, ignore: list[re.Pattern[str]]) -> list[_Found]:
    """The items of the model's layers, with the prefixes that ``spec`` uses.

    A checkpoint that does not have the model's prefix may call it otherwise, if there is only one other.
    """
    wanted = {(_prefix(layer), layer.layer) for layer in spec.layers}
    own = {prefix for prefix, _ in wanted}
    numbers = {number for _, number in wanted}
    items = [item for item in items if item.layer in numbers]
    if len(own) > 1 or own & {item.prefix for item in items}:
        return [item for item in items if (item.prefix, item.layer) in wanted]
    (prefix,) = own
    others = [
        item
        for item in items
        if not _MTP.search(item.name) and not any(pattern.search(item.name) for pattern in ignore)
    ]
    prefixes = sorted({item.prefix for item in others})
    if len(prefixes) > 1:
        names = " and ".join(f"{other}layers" for other in prefixes)
        raise CheckpointError(f"the checkpoint has routed experts in {names}, but none in {prefix}layers")
    return [_Found(item.name, prefix, item.layer, item.path, item.end) for item in others]


def _refuse_quantised(items: list[_Found], entries: Mapping[str, TensorEntry]) -> None:
    supported = "; greenroom supports BF16, FP16 and FP32 experts now"
    for pattern, kind in _QUANTISED:
        for item in items:
            if re.search(pattern, item.end):
                raise UnsupportedModelError(f"the experts are quantised as {kind} (tensor '{item.name}'){supported}")
    for item in items:
        dtype = entries[item.name].dtype
        if dtype not in SUPPORTED_DTYPES:
            shown = str(dtype).removeprefix("torch.")
            raise UnsupportedModelError(f"the experts have dtype {shown} (tensor '{item.name}'){supported}")


def _place_layer(
    index: int, layer: ExpertLayerSpec, items: list[_Found], entries: Mapping[str, TensorEntry]
) -> Iterator[ExpertPiece]:
    needed = _needed(layer)
    holders: dict[tuple[int, Part], ExpertPiece] = {}
    for item in items:
        piece = _piece(index, layer, item)
        for expert in range(layer.num_experts) if piece.expert is None else [piece.expert]:
            for part in _split(piece.part):
                if part not in needed or expert >= layer.num_experts:
                    raise CheckpointError(
                        f"{entries[item.name].file}: tensor '{item.name}' has no place in a model with "
                        f"{layer.num_experts} experts of {', '.join(needed)} in layer {layer.layer}"
                    )
                if (other := holders.setdefault((expert, part), piece)) is not piece:
                    raise CheckpointError(
                        f"tensors '{other.name}' and '{item.name}' both hold the {part} of expert {expert}"
                    )
        yield piece
    for expert in range(layer.num_experts):
        for part in needed:
            if (expert, part) not in holders:
                raise _missing(layer, expert, part, items, entries)


def _piece(index: int, layer: ExpertLayerSpec, item: _Found) -> ExpertPiece:
    number, _, end = item.end.partition(".")
    if number.isdecimal() and item.path.endswith("experts.") and end in _ONE_EXPERT:
        return ExpertPiece(item.name, index, int(number), _ONE_EXPERT[end])
    if item.path.endswith("experts.") and item.end in _ALL_EXPERTS:
        part = _ALL_EXPERTS[item.end]
        return ExpertPiece(
            item.name,
            index,
            None,
            part,
            transposed=layer.transposed and part in _WEIGHTS,
            interleaved=layer.interleaved and len(_split(part)) == 2,
        )
    if item.path.endswith("block_sparse_moe.") and item.end in _GRANITE:
        return ExpertPiece(item.name, index, None, _GRANITE[item.end])
    raise UnsupportedModelError(f"greenroom does not know what tensor '{item.name}' means for an expert")


def _needed(layer: ExpertLayerSpec) -> tuple[Part, ...]:
    weights = (Part.GATE, Part.UP, Part.DOWN) if layer.format.gated else (Part.UP, Part.DOWN)
    return weights + tuple(Part(f"{part}_bias") for part in weights) if layer.format.bias else weights


def _split(part: Part) -> tuple[Part, ...]:
    """The projections that a tensor holds."""
    if part == Part.GATE_UP:
        return Part.GATE, Part.UP
    if part == Part.GATE_UP_BIAS:
        return Part.GATE_BIAS, Part.UP_BIAS
    return (part,)


def _missing(
    layer: ExpertLayerSpec, expert: int, part: Part, items: list[_Found], entries: Mapping[str, TensorEntry]
) -> CheckpointError:
    """Names the tensor as its siblings in the same layer are named, and where they are."""
    if not items:
        return CheckpointError(f"the checkpoint has no routed experts for layer {layer.layer} ('{layer.name}')")
    sibling = items[0]
    stem = sibling.name.removesuffix(sibling.end)
    number, _, end = sibling.end.partition(".")
    if number.isdecimal():
        names = [name for name, known in _ONE_EXPERT.items() if known == part]
        name = f"{stem}{expert}.{names[end.startswith('w')]}"
        # The closest relative: an expert's projections are usually in the same file.
        sibling = next((item for item in items if item.end.startswith(f"{expert}.")), sibling)
    else:
        fused = [known for known in Part if layer.format.gated and part in _split(known)]
        table = _GRANITE if sibling.end in _GRANITE else _ALL_EXPERTS
        name = stem + next((end for end, known in table.items() if known in (fused or [part])), part)
    return CheckpointError(
        f"tensor '{name}' is missing from the checkpoint; its sibling '{sibling.name}' is in "
        f"{entries[sibling.name].file}"
    )
