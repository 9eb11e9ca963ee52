"""Has the experts that a router has chosen made real while a mixture of experts runs.

An experts module holds the weights of all its experts in parameters of three dimensions, of which a
call uses the slices that its ids name. So its forward runs unchanged over address space in which
only these slices are there. Where not all of them can be at once, they come one by one while it
runs: see [Note: one expert at a time].

[Note: one expert at a time] The library multiplies in one of three ways. A loop takes `weight[e]`
of one expert after the other. A grouped product on the CPU is one product for each group of rows,
into its rows of the output, in the order of the experts; it is computed here in the same way, in
whichever order experts come, which changes nothing in the values of any. A batched one copies the
slice of each row of input; here it is copied as it comes. All three are seen by a function mode,
and only while the module runs. Where each expert is a module of its own, so is any function that is
given a parameter of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from pipeload_hooks._attach import recording
from pipeload_hooks._evicted import BESIDE
from pipeload_hooks._ids import attach_ids
from pipeload_hooks._modes import PassMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch.utils.hooks import RemovableHandle

_GROUPED = frozenset(
    function
    for function in (
        getattr(torch, "_grouped_mm", None),
        getattr(nn.functional, "grouped_mm", None),
    )
    if function is not None
)
_VIEWS = BESIDE | {
    torch.Tensor.transpose,
    torch.transpose,
    vars(torch._C.TensorBase)["mT"].__get__,
    vars(torch._C.TensorBase)["data"].__get__,
    torch.Tensor.detach,
}
"""What may be asked of a parameter whose slices are not all there: its views have its address."""
IDS, COUNTS, MARKS = "ids", "counts", "marks"
"""What tells an experts module which experts a call is sent to."""
_MATRICES = 2
_STACKED = 3  # dimensions
_INTEGERS = frozenset({torch.int32, torch.int64})


class ExpertSource(Protocol):
    """Makes experts real while their module runs."""

    def experts_wanted(self, ids: torch.Tensor) -> None:
        """Return once a forward with these ids (any shape) may run. May read the disk.

        May be called again before `experts_done`.
        """

    def experts_done(self) -> None:
        """The module has run. Must do nothing when none were wanted."""

    def refuse_recording(self) -> None:
        """Autograd would record weights that are gone by the time of backward: raise."""


class Service(Protocol):
    """Has experts come one by one, in whatever order they are asked for."""

    def order(self, name: str, experts: Sequence[int]) -> Sequence[int]:
        """In which order the slices `experts` of a parameter had best be asked for."""

    def need(self, name: str, expert: int) -> None:
        """Return once that slice of a parameter is there. The one asked for before may go."""

    def together(self, name: str, experts: Sequence[int]) -> Iterable[Sequence[int]]:
        """All of `experts`, in portions that are there at once until the next is asked for."""

    def refuse(self, function: str, name: str) -> NoReturn:
        """Say that a function is given a parameter whose slices are not all there: raise."""


def experts_at_hand(parameter: torch.Tensor, experts: Sequence[int]) -> Iterable[Sequence[int]]:
    """In which portions something whose result does not depend on it had best take slices.

    All slices of a portion are there until the next one is asked for.
    """
    if has_torch_function_unary(parameter):
        asked: Iterable[Sequence[int]] = handle_torch_function(
            experts_at_hand, (parameter,), parameter, experts
        )
        return asked
    return (experts,)


def attach_experts(
    module: nn.Module, source: ExpertSource, *, told_by: str = IDS
) -> tuple[RemovableHandle, ...]:
    """Have `source` called around every call of `module`, whose second argument are ids.

    Or, if `told_by` is COUNTS, how many rows each expert gets, one behind the other; if MARKS,
    numbers of `[rows, .., experts]`, which are 0 where a row is not sent to an expert.

    `experts_done` also runs when the forward raises an Exception, but not for a KeyboardInterrupt:
    torch skips its hooks then, so the source must recover by itself at the next `experts_wanted`.
    """

    def before(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled() and recording((*args, *kwargs.values())):
            source.refuse_recording()

    wanted, done = source.experts_wanted, source.experts_done
    return attach_ids(module, 1, wanted, done, before=before, read=_READS[told_by])


def _ids_of_counts(given: object) -> torch.Tensor | None:
    """The expert of each row."""
    if not isinstance(given, list) or not all(isinstance(count, int) for count in given):
        return None
    return torch.arange(len(given)).repeat_interleave(torch.tensor(given, dtype=torch.int64))


def _ids_of_marks(given: object) -> torch.Tensor | None:
    """The expert of each mark."""
    return given.nonzero()[:, -1] if isinstance(given, torch.Tensor) and given.dim() else None


_READS = {IDS: None, COUNTS: _ids_of_counts, MARKS: _ids_of_marks}


class ServeExperts(PassMode):
    """While active in a thread, products with the given parameters have their experts come."""

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        service: Service,
        owners: Mapping[str, int] | None = None,
    ) -> None:
        """`parameters` are an experts module's, by name, bound to where slices come to.

        `owners`: of those that are one expert's own, whose.
        """
        super().__init__()
        self._owners = owners or {}
        self._by_id = {id(parameter): name for name, parameter in parameters.items()}
        with torch._C.DisableTorchFunction():
            self._by_address = {p.data_ptr(): name for name, p in parameters.items()}
        self._service = service
        self._stacks: list[tuple[torch.Tensor, str]] = []
        """What shows a parameter as a stack, where experts lie one below the other in it."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not self.active:
            return func(*args, **kwargs)
        if func in _GROUPED:
            name = self._by_address.get(_weight_of(args, kwargs).data_ptr())
            if name is not None:
                return self._grouped(name, func, args, kwargs)
        elif func is experts_at_hand:
            name = self._by_id.get(id(args[0]))
            return (args[1],) if name is None else self._service.together(name, args[1])
        elif func is torch.Tensor.view and id(args[0]) in self._by_id:
            return self._stack(self._by_id[id(args[0])], func(*args, **kwargs))
        elif func is torch.Tensor.__getitem__ and (name := self._name_of(args[0])) is not None:
            return self._slices(name, *args)
        elif func not in _VIEWS:
            for value in (*args, *kwargs.values()):
                if id(value) in self._by_id:
                    self._whole(self._by_id[id(value)], func)
        return func(*args, **kwargs)

    def _whole(self, name: str, func: Callable[..., Any]) -> None:
        if name not in self._owners:
            self._service.refuse(getattr(func, "__name__", str(func)), name)
        self._service.need(name, self._owners[name])

    def _stack(self, name: str, stack: torch.Tensor) -> torch.Tensor:
        if stack.dim() != _STACKED:
            self._service.refuse("view", name)
        self._stacks.append((stack, name))
        return stack

    def _name_of(self, value: torch.Tensor) -> str | None:
        named = self._by_id.get(id(value))
        return named or next((name for stack, name in self._stacks if stack is value), None)

    def _grouped(
        self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> torch.Tensor:
        plain = all(kwargs.get(name) is None for name in ("bias", "out_dtype"))
        if len(args) > _MATRICES or not plain:
            self._service.refuse(getattr(func, "__name__", str(func)), name)
        given, weight = args[0], _weight_of(args, kwargs)
        stops = kwargs["offs"].tolist()
        starts = dict(enumerate([0, *stops[:-1]]))
        groups = [expert for expert, stop in enumerate(stops) if stop > starts[expert]]
        out = empty_grouped(given, weight.size(-1))
        for expert in self._service.order(name, groups):
            self._service.need(name, expert)
            rows = slice(starts[expert], stops[expert])
            torch.mm(given[rows], weight[expert], out=out[rows])
        return out

    def _slices(self, name: str, parameter: torch.Tensor, index: object) -> torch.Tensor:
        if isinstance(index, int) or (isinstance(index, torch.Tensor) and not index.dim()):
            self._service.need(name, int(index))
            return parameter[index]
        if not isinstance(index, torch.Tensor) or index.dtype not in _INTEGERS or index.dim() != 1:
            self._service.refuse("__getitem__", name)
        out = parameter.new_empty((len(index), *parameter.shape[1:]))
        values = parameter.detach()
        index = torch.where(index < 0, index + parameter.shape[0], index)
        chosen: list[int] = sorted(set(index.tolist()))
        for expert in self._service.order(name, chosen):
            self._service.need(name, expert)
            out[index == expert] = values[expert]
        return out


def _weight_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    weight: torch.Tensor = args[1] if len(args) > 1 else kwargs.get("mat2", kwargs.get("mat_b"))
    return weight


def empty_grouped(given: torch.Tensor, columns: int) -> torch.Tensor:
    """An output of a grouped product as torch makes it: rows begin at multiples of 16 bytes."""
    step = 16 // given.element_size()
    strides = (columns + -columns % step, 1)
    size = (given.size(0), columns)
    return torch.empty_strided(size, strides, dtype=given.dtype, device=given.device)
