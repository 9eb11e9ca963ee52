"""One memory that a model has a part in, as its governor sees it: the process's, or a device's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol

from pipeload.budget.shared_limit import Client

if TYPE_CHECKING:
    from pipeload.budget.pass_needs import PassNeeds
    from pipeload.budget.pass_shape import PassShape
    from pipeload.budget.plan import Plan
    from pipeload.budget.shared_limit import Accountant


class Owner(Client, Protocol):
    """Whose ledger it is: a client of the memory's account, which has a plan."""

    plan: Plan
    """What is to be kept and streamed: in force once no pass is in the way."""

    def put_into_force(self, plan: Plan) -> bool:
        """Have that plan from now on; False when a pass is running."""


class TooLarge(NamedTuple):
    """A pass that does not fit even with nothing resident. In bytes."""

    shape: PassShape
    need: int
    """What it takes beside weights."""
    free: int
    """What is there for it; may be negative."""
    wanted: int
    """The smallest limit that it fits."""


class Ledger(Protocol):
    """What is in one memory, and what it allows. Sizes in bytes."""

    @property
    def account(self) -> Accountant:
        """Everybody who has a part in it."""

    @property
    def fixed_bytes(self) -> int:
        """What this model takes of it whatever is streamed."""

    @property
    def process_bytes(self) -> int:
        """All that the process held when a pass looked last; 0 where passes do not look."""

    @property
    def looks_inside(self) -> bool:
        """Whether it is measured before each site of a pass, too."""

    @property
    def device(self) -> str | None:
        """Whose memory it is; None: the process's."""

    # -- arithmetic --

    def limit_in_force(self, limit: int, /) -> int:
        """A limit, or less where the system has less."""

    def tables_bytes(self, limit: int, /) -> int:
        """What the kernel's own tables take of a limit."""

    def limit_for(self, nbytes: int, /) -> int:
        """The smallest limit that leaves so much beside these tables."""

    def taken_bytes(self, limit: int, other: int, /) -> int:
        """What a limit has to hold beside weights that stream, if `other` is measured now."""

    def allows(self, nbytes: int, limit: int, /) -> bool:
        """Whether so much fits a limit beside what is there now, the model's own left out."""

    def held_bytes(self, plan: Plan, /) -> int:
        """The model's weights and buffers that are there now."""

    def moved_bytes(self, plan: Plan, /) -> int:
        """What comes there in each pass."""

    # -- passes --

    def corrected(self, need: int, /) -> int:
        """An estimate of what a pass needs, raised by what the last ones fell short."""

    def uncorrected(self, nbytes: int, /) -> int:
        """The estimate that is raised to so much."""

    def begin_pass(self, held: int, /) -> int:
        """What is there beside weights that stream; a pass begins, and the model holds `held`."""

    def inside_pass(self) -> int:
        """What is there beside weights that stream, in a pass."""

    def taken_by_pass(self, other: int, /) -> int:
        """What of `other` the running pass took on, as far as that is measured."""

    def end_pass(self, need: int, held: int, limit: int, /) -> None:
        """A pass is over that was granted `need`; the model holds `held`."""

    # -- plans --

    def complete(self, plan: Plan, before: Plan, /) -> Plan:
        """A plan with what it takes of other memories, if it comes after `before`."""

    def follow(self, plan: Plan, /) -> None:
        """Units come as this plan says from now on."""

    def look_beside(self) -> bool:
        """Measure other memories that the plan takes; whether it takes another amount now."""

    def take_limit(self, limit: int, /) -> None:
        """Another limit is in force from now on."""

    def trim(self) -> bool:
        """Give back what nobody uses after weights went; whether all should go once for more."""

    # -- membership --

    def join(self, owner: Owner, /) -> None:
        """Count the model from now on."""

    def leave(self, owner: Owner, /) -> None:
        """Count it no more. May be called again."""

    def forget(self, owner: Owner, /) -> bool:
        """In a forked child: count it no more. Whether its memory can be given back there."""

    def set_limit(self, memory_limit: int | str, host_memory_limit: int | str | None, /) -> None:
        """Change the limit, for everybody who shares it.

        Raises:
            MemoryLimitError: it is too small; nothing changes.
            OptionError: it is no size, or there is no such limit.
        """

    def figures(self) -> dict[str, Any]:
        """What `Stats` shows of a device: nothing on the CPU."""

    # -- refusals --

    def refuse_pass(self, found: TooLarge, needs: PassNeeds, limit: int, /) -> NoReturn:
        """Say that a pass is too large, and what would fit.

        Raises:
            PassMemoryLimitError: always.
        """
