"""Prefetch: a layer's weights are copied into a buffer on the device ahead of the layer's turn.

Unit k (the k-th offloaded layer) always lives in slot k % slots, and its parameters point there for good. A slot's next
unit is copied, in one piece or several, once the one before has been computed: ``schedule`` says when.

Between two passes each slot holds its home unit, complete, whatever happened in the pass before. A captured pass
therefore begins and ends like an eager one, and they may follow each other in any order:

- Every copy that a pass started is waited for inside the pass: by the unit that it is for, or at the pass's end.
- Nothing of a pass waits for what another one started.
- A pass that failed puts the home units back before the error leaves the decoder. If it failed while it was captured,
  none of its copies was made, so there is nothing to put back. An interrupt (KeyboardInterrupt) reaches no hook: the
  next pass that runs eagerly puts them back, and no captured one may be replayed before.
"""

import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from greenroom.errors import ConfigError, EngineError
from greenroom.weights.base import WeightOffloader
from greenroom.weights.copies import Copies, HostCopies, StreamCopies
from greenroom.weights.host_block import HostBlock, empty, take_unit
from greenroom.weights.schedule import LEAST_PIECE, Fill, bytes_beside_experts, schedule
from greenroom.weights.select import Selection


@dataclass(frozen=True)
class _Held:
    """A unit's block in host memory, and its parameters with the addresses that they must have."""

    name: str
    block: HostBlock
    parameters: list[nn.Parameter]
    addresses: list[int]


class PrefetchOffload(WeightOffloader):
    """Passes run one at a time. Those on different streams must be ordered by who starts them."""

    def __init__(
        self,
        selection: Selection,
        device: torch.device,
        copies: Copies | None = None,
        least_piece: int = LEAST_PIECE,
    ) -> None:
        """
        Args:
            copies: how they are made; by default as the device needs.
            least_piece: bytes that a unit is copied in at once at least.
        """
        super().__init__(selection)
        self._device = device
        slots = selection.num_slots
        on_gpu = device.type == "cuda"
        self._copies = copies or (StreamCopies(slots, device) if on_gpu else HostCopies())
        self._memory: torch.Tensor | None = None
        self._held: list[_Held] = []
        self._hooks: list[RemovableHandle] = []
        self._owner: threading.Thread | None = None  # whose pass is running
        self._next = 0  # unit whose turn it is in that pass
        plan = schedule(selection, least_piece)
        self._homes = list(plan.homes)
        self._fills = {fill.after: fill for fill in plan.fills}
        self._further = [fill for fill in plan.fills if fill.layers]
        self._holds = list(plan.homes)  # unit in each slot, once its copies have landed
        self._started = [0] * slots  # bytes of that unit whose copies have been started
        self._pending: set[int] = set()  # slots whose copies the current stream does not wait for yet

    def take(self, model: nn.Module) -> None:
        """Also fills the slots with their home units."""
        lock = self._device.type == "cuda"
        slots, size = self.selection.num_slots, self.selection.slot_bytes
        self._memory = torch.empty(slots, size, dtype=torch.uint8, device=self._device)
        try:
            for number, unit in enumerate(self.selection.units):
                block, parameters = take_unit(unit, model, lock)
                views = unit.views(self._memory[number % slots])
                self._held.append(_Held(unit.module, block, parameters, [view.data_ptr() for view in views]))
                for parameter, view in zip(parameters, views, strict=True):
                    parameter.data = view
        except BaseException:
            self.close()
            raise
        for slot, home in enumerate(self._homes):
            self._fill(slot, home)
        self._settle()

    @property
    def bytes_beside_experts(self) -> float:
        return bytes_beside_experts(self.selection) / self.selection.num_layers

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Adds hooks to the units' modules, the layers at whose begin pieces are copied, and the decoder.

        A compiler does not look into them: it breaks its graph there, so that copies stay between what was before
        and behind them.
        """
        opaque = torch.compiler.disable
        for number, unit in enumerate(self.selection.units):
            module = _called(model, unit.module)
            turn = _Turn(self, number)
            self._hooks.append(module.register_state_dict_pre_hook(_refuse_state))
            self._hooks.append(module.register_forward_pre_hook(opaque(turn.before)))
            self._hooks.append(module.register_forward_hook(opaque(turn.after)))
        for fill in self._further:
            piece = _Piece(self, fill)
            for layer in fill.layers:
                module = decoder.get_submodule(f"layers.{layer}")
                self._hooks.append(module.register_forward_pre_hook(opaque(piece.copy)))
        self._hooks.append(decoder.register_forward_pre_hook(opaque(self._open)))
        self._hooks.append(decoder.register_forward_hook(opaque(self._end), always_call=True))

    def close(self) -> None:
        """Removes the hooks and frees the memory."""
        for hook in self._hooks:
            hook.remove()
        for held in self._held:
            empty(held.parameters)
            held.block.close()
        self._hooks, self._held, self._memory = [], [], None

    def check(self) -> None:
        """Between passes: every slot holds its home unit, byte for byte, and every parameter is where it belongs."""
        assert self._memory is not None
        assert not self._pending
        assert self._owner is None
        assert self._holds == self._homes
        for home, memory in zip(self._homes, self._memory, strict=True):
            block = self._held[home].block.memory
            assert torch.equal(memory[: len(block)].cpu(), block)
        for held in self._held:
            assert [parameter.data_ptr() for parameter in held.parameters] == held.addresses

    def before_unit(self, number: int) -> None:
        """The current stream may read the unit's weights from here on.

        Raises:
            EngineError: it is not the unit's turn, or its parameters were moved.
        """
        held = self._held[number]
        if self._owner is not threading.current_thread() or number != self._next:
            raise EngineError(
                f"'{held.name}' ran out of turn, but its weights are prefetched in the order of the decoder's layers; "
                "run whole passes of the decoder in one thread, or choose the uva backend"
            )
        for parameter, address in zip(held.parameters, held.addresses, strict=True):
            if parameter.data_ptr() != address:
                raise EngineError(
                    f"the weights of '{held.name}' were moved or converted, but are prefetched to where they were; "
                    "load the model with the device and dtype that it shall have"
                )
        slot = number % len(self._holds)
        assert self._holds[slot] == number
        if slot in self._pending:
            self._start(slot, len(held.block.memory))  # a layer that did not run started no piece
            self._copies.wait(slot)
            self._pending.remove(slot)

    def after_unit(self, number: int) -> None:
        """The current stream was given the last work that reads the unit's weights."""
        self._next = number + 1
        self._begin(self._fills.get(number))

    def copy_piece(self, fill: Fill) -> None:
        """A layer begins beside whose experts another piece of a unit shall be copied."""
        slot = fill.unit % len(self._holds)
        if self._owner is threading.current_thread() and self._holds[slot] == fill.unit and slot in self._pending:
            self._start(slot, self._started[slot] + fill.piece_bytes)

    def _open(self, module: nn.Module, args: Any) -> None:
        current, last = threading.current_thread(), self._owner
        if last is not None and last is not current and last.is_alive():
            raise EngineError("another pass of this model is running; its weights are prefetched for one at a time")
        self._owner = current
        self._next = 0
        if last is not None:
            # torch calls no hook behind an interrupt, so that pass is still to be ended.
            for slot, home in enumerate(self._homes):
                self._fill(slot, home)
            self._settle()
        self._begin(self._fills.get(None))

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        # Also behind an exception (without an output), even that of a pass that was refused: not ours to end.
        if self._owner is not threading.current_thread():
            return
        try:
            if output is None and self._copies.recording():
                self._holds = list(self._homes)
                self._pending.clear()
                return
            for slot, home in enumerate(self._homes):
                if self._holds[slot] != home:  # the pass ended early
                    self._fill(slot, home)
            self._settle()
        finally:
            self._owner = None

    def _begin(self, fill: Fill | None) -> None:
        """Starts the first piece."""
        if fill is not None:
            slot = fill.unit % len(self._holds)
            self._give(slot, fill.unit)
            self._start(slot, fill.piece_bytes)

    def _fill(self, slot: int, number: int) -> None:
        """Starts all of a unit's copy."""
        self._give(slot, number)
        self._start(slot, len(self._held[number].block.memory))

    def _give(self, slot: int, number: int) -> None:
        self._holds[slot], self._started[slot] = number, 0
        self._pending.add(slot)

    def _start(self, slot: int, until: int) -> None:
        """Starts the copy of what is missing of the slot's unit up to that byte."""
        assert self._memory is not None
        block, started = self._held[self._holds[slot]].block.memory, self._started[slot]
        until = min(until, len(block))
        if until > started:
            self._copies.start(slot, self._memory[slot, started:until], block[started:until])
            self._started[slot] = until

    def _settle(self) -> None:
        """The current stream waits for all copies, and for what of them has not been started."""
        for slot in sorted(self._pending):
            self._start(slot, len(self._held[self._holds[slot]].block.memory))
            self._copies.wait(slot)
        self._pending.clear()


def _called(model: nn.Module, name: str) -> nn.Module:
    """The module, or the closest one around it that is called at all: lists of modules are not."""
    module = model.get_submodule(name)
    while isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        name = name.rpartition(".")[0]
        module = model.get_submodule(name)
    return module


def _refuse_state(module: nn.Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001, torch names the arguments
    raise ConfigError(
        f"'{prefix.rstrip('.')}' has prefetched weights, whose parameters hold whichever layer's turn it is; load the "
        "model without weights_offload_group_size to read or save its weights"
    )


class _Turn:
    """The hooks of one unit's module."""

    def __init__(self, offload: PrefetchOffload, number: int) -> None:
        self._offload = offload
        self._number = number

    def before(self, module: nn.Module, args: Any) -> None:
        self._offload.before_unit(self._number)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self._offload.after_unit(self._number)


class _Piece:
    """The hook of layers at whose begin another piece of a unit is copied."""

    def __init__(self, offload: PrefetchOffload, fill: Fill) -> None:
        self._offload = offload
        self._fill = fill

    def copy(self, module: nn.Module, args: Any) -> None:
        self._offload.copy_piece(self._fill)
