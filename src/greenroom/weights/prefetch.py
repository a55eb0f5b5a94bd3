"""Prefetch: a layer's weights are copied into a buffer on the device ahead of the layer's turn.

Unit k (the k-th offloaded layer) always lives in slot k % slots, and its parameters point there for good. Its successor
in the slot is unit k + slots or, behind the last one, the slot's first unit, for the next pass. That successor's copy
starts when unit k has been computed, so ``slots`` units ahead; a slot that only one unit uses is never written again.

Between two passes slot s holds unit s, complete, whatever happened in the pass before. A captured pass therefore begins
and ends like an eager one, and they may follow each other in any order:

- Every copy that a pass started is waited for inside the pass: by the unit that it is for, or at the pass's end.
- Nothing of a pass waits for what another one started.
- A pass that failed puts the first units back before the error leaves the decoder. If it failed while it was captured,
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

    def __init__(self, selection: Selection, device: torch.device, copies: Copies | None = None) -> None:
        """``copies``: how they are made; by default as the device needs."""
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
        self._holds = list(range(slots))  # unit in each slot, once its copy has landed
        self._pending: set[int] = set()  # slots whose copy the current stream does not wait for yet

    def take(self, model: nn.Module) -> None:
        """Also fills the slots with the first units."""
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
        for slot in range(slots):
            self._fill(slot, slot)
        self._settle()

    def attach(self, model: nn.Module, decoder: nn.Module) -> None:
        """Adds hooks to the units' modules and the decoder.

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
        """Between passes: every slot holds its first unit, byte for byte, and every parameter is where it belongs."""
        assert self._memory is not None
        assert not self._pending
        assert self._owner is None
        assert self._holds == list(range(self.selection.num_slots))
        for slot, memory in enumerate(self._memory):
            block = self._held[slot].block.memory
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
        if slot in self._pending:
            self._copies.wait(slot)
            self._pending.remove(slot)
        assert self._holds[slot] == number

    def after_unit(self, number: int) -> None:
        """The current stream was given the last work that reads the unit's weights."""
        self._next = number + 1
        slots = len(self._holds)
        following = number + slots
        if following >= len(self._held):
            following = number % slots
        if following != number:
            self._fill(number % slots, following)

    def _open(self, module: nn.Module, args: Any) -> None:
        current, last = threading.current_thread(), self._owner
        if last is not None and last is not current and last.is_alive():
            raise EngineError("another pass of this model is running; its weights are prefetched for one at a time")
        self._owner = current
        self._next = 0
        if last is not None:
            # torch calls no hook behind an interrupt, so that pass is still to be ended.
            for slot in range(len(self._holds)):
                self._fill(slot, slot)
            self._settle()

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        # Also behind an exception (without an output), even that of a pass that was refused: not ours to end.
        if self._owner is not threading.current_thread():
            return
        try:
            if output is None and self._copies.recording():
                self._holds = list(range(len(self._holds)))
                self._pending.clear()
                return
            for slot, holds in enumerate(self._holds):
                if holds != slot:  # the pass ended early
                    self._fill(slot, slot)
            self._settle()
        finally:
            self._owner = None

    def _fill(self, slot: int, number: int) -> None:
        assert self._memory is not None
        block = self._held[number].block.memory
        self._copies.start(slot, self._memory[slot, : len(block)], block)
        self._holds[slot] = number
        self._pending.add(slot)

    def _settle(self) -> None:
        """The current stream waits for all copies."""
        for slot in sorted(self._pending):
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
