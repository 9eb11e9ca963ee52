"""A model for several machines: what is asked for, and this process's share of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from pipeload.errors import OptionError
from pipeload.formats.compiler import compiler
from pipeload.hf.marks import attention_of
from pipeload.ring.dealt_parts import layers_of_all, parts_to_deal
from pipeload.ring.head_rows import head_rows
from pipeload.ring.joining import AUTO, MIXED, Membership, Powers, wanted_size

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from torch import nn

    from pipeload.budget.cut import Touched
    from pipeload.engine.assembly import Assembly
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.ring.turns import Turns
    from pipeload.weights.device_interface import Device

_SHARED: weakref.WeakKeyDictionary[nn.Module, Turns] = weakref.WeakKeyDictionary()
"""Models of which other ranks run a part, and how requests take turns on all of them."""


def check_ranks(ranks: object, device: Device | None) -> int | str | None:
    """What is to be shared out to ranks; None where this process has the model for itself.

    Raises:
        OptionError: it means nothing, or the environment has other ranks, or a device is asked for.
    """
    if ranks is None:
        return None
    number = isinstance(ranks, int) and not isinstance(ranks, bool) and ranks > 0
    if not number and ranks not in (AUTO, MIXED):
        raise OptionError(
            f'ranks={ranks!r} means nothing. Give "auto", "mixed" or how many there are.'
        )
    wanted = ranks if isinstance(ranks, (int, str)) else None
    if wanted_size(wanted) == 1:
        return None
    if device is not None:
        raise OptionError(
            f"ranks={ranks!r} on {device.where}: several machines compute on their processors "
            "alone so far. Leave device out."
        )
    return wanted


def join(
    ranks: int | str,
    pending: PendingLoad,
    touched: Touched | None,
    room: Callable[[], int],
    *,
    exact_inputs: bool = False,
) -> Membership:
    """Meet the other ranks, compare what each has, and deal the model out.

    `room`: bytes that this rank has for weights; `exact_inputs`: whether that was asked for.

    Raises:
        GroupError: a rank does not come, has another model, or could not go on.
        UnsupportedModelError: the model's blocks cannot be run apart.
    """
    member = Membership(ranks)
    try:
        model, entries = pending.model, pending.checkpoint.entries
        kernels = {
            "kernel of the weights": pending.kernel(),
            "exact_inputs": exact_inputs,
            "C compiler": "none" if compiler() is None else "found",
        }
        member.agree(model.config.to_dict(), entries, attention_of(model.config), kernels)
        with member.together("blocks are looked at"):
            parts = parts_to_deal(model, pending.weights(), touched)
            hidden = int(getattr(model.config.get_text_config(), "hidden_size", 0) or 0)
            nbytes = hidden * model.dtype.itemsize
            head = None if parts[-1].layers else head_rows(model, pending.weights(), touched)
            mine = Powers(room(), pending.files, model.dtype, nbytes, head)
        member.deal_out(parts, mine)
    except BaseException:
        member.close()
        raise
    return member


def layers_elsewhere(member: Membership | None, model: nn.Module) -> Collection[int]:
    """The layers of a cache of which this rank holds nothing; without other ranks it has all."""
    return set() if member is None else set(member.layers_away) - layers_of_all(model)


def share(member: Membership, assembly: Assembly, model: nn.Module) -> None:
    """Have other ranks run their parts of a model, until it is taken down."""
    assembly.at_removal(member.close)
    for undo in member.attach(model):
        assembly.at_removal(undo)
    _SHARED[model] = member.turns


def turns_of(model: Any) -> Turns | None:
    """How requests take turns on a model that several ranks run; None where one does.

    It may be in a wrapper, as PEFT's.
    """
    shared: Any = next((module for module in model.modules() if module in _SHARED), None)
    return None if shared is None or shared.pipeload.removed else _SHARED[shared]
