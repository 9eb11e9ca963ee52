"""What belongs to a pass while it runs: the only one, or each of those that take turns."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from pipeload.engine.pass_log import PassLog
from pipeload_hooks import PassGate

if TYPE_CHECKING:
    from pipeload.engine.pass_modes import PassModes


class Running(enum.Enum):
    """Who says that the running pass is over."""

    NOTHING = enum.auto()  # none runs
    MODEL = enum.auto()  # hooks of one of the library's models
    PART = enum.auto()  # the site or table that was called by itself, and is a pass of its own
    CALL = enum.auto()  # nobody: it lasts as long as a call past the model's hooks


class PassState:
    """Where the passes of some threads stand, of which one runs at a time."""

    def __init__(self, gate: PassGate, modes: PassModes, held: set[int]) -> None:
        self.gate, self.modes = gate, modes
        self.running = Running.NOTHING
        self.inside: set[int] = set()
        """Sites that are running."""
        self.held = held
        """Units that were acquired and are not released yet."""
        self.log = PassLog()

    def twin(self) -> PassState:
        """One for passes of another thread, which take turns with these."""
        gate = PassGate()
        return PassState(gate, self.modes.twin(gate), set())
