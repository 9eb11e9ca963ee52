"""Answers a `from_pretrained`: the library builds the model, its weights are streamed."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeload.budget import limit_errors
from pipeload.budget.cut import Divider, NothingToStreamError, Touched
from pipeload.budget.cut_fineness import Cuttings
from pipeload.budget.host_memory import HostMemory
from pipeload.budget.make_plan import make_plan
from pipeload.budget.measured_host import measure
from pipeload.budget.model_parts import ALL_HERE, Elsewhere
from pipeload.budget.pass_needs import PassNeeds
from pipeload.budget.reserve import reserve_bytes
from pipeload.budget.shared_limit import ACCOUNTANT
from pipeload.budget.usage_trial import probe_usage
from pipeload.devices.device_backend import make_target
from pipeload.devices.device_memory import DeviceMemory
from pipeload.devices.measured_device import measure_device
from pipeload.devices.shared_device_limit import account_of
from pipeload.engine.assembly import Assembly
from pipeload.engine.forks import give_back_inherited
from pipeload.entry.device_refusals import refuse_dtypes, refuse_quantised
from pipeload.entry.exact_inputs import keep_inputs_exact
from pipeload.entry.notebook_bar import show_first_pass
from pipeload.entry.prepare_process import prepare_process
from pipeload.entry.ranks import join, layers_elsewhere, share
from pipeload.entry.sources import check_source
from pipeload.errors import MemoryLimitError
from pipeload.hf import takeover
from pipeload.hf.expert_modules import experts_apart, experts_in_turn
from pipeload.hf.written_attention import WrittenAttention
from pipeload.system.library_pages import lower_floor
from pipeload.system.memory import rss_bytes
from pipeload.system.openmp_hint import advise_openmp
from pipeload.weights.device_interface import aligned

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection, Mapping, Sequence
    from pathlib import Path

    from torch import nn

    from pipeload.budget.make_plan import Build
    from pipeload.entry.request import Request
    from pipeload.hf.pending_load import PendingLoad
    from pipeload.ring.joining import Membership
    from pipeload.weights.device_interface import Device
    from pipeload.weights.layout import Weight

_log = logging.getLogger("pipeload")


class Loading:
    """An `Intercept` that streams every model it is asked for."""

    def __init__(self, request: Request, *, lenient: bool) -> None:
        """`lenient`: a model that has nothing to stream is loaded plainly, if it fits the limit."""
        self.request = request
        self._lenient = lenient
        self.loaded = False
        """Whether any model was loaded."""

    def __call__(
        self,
        load: Callable[..., Any],
        pretrained_model_name_or_path: str | os.PathLike[str] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Load one model, streamed. `load` is the library's own function."""
        check_limits(self.request)
        device = self.request.options.device
        passed_on = check_source(pretrained_model_name_or_path, kwargs, device)
        advise_openmp()
        built: list[Assembly] = []

        def stream(pending: PendingLoad) -> Any:
            self.loaded = True
            keep_inputs_exact(pending, self.request, lenient=self._lenient)
            try:
                assembly, report = assemble(pending, self.request)
            except NothingToStreamError as error:
                return self._load_plainly(pending, error)
            built.append(assembly)
            return report

        try:
            with takeover.take_over_loading(stream, device, self.request.options.read_timeout):
                result = load(pretrained_model_name_or_path, *args, **passed_on)
            for assembly in built:
                finish(assembly, result[0] if isinstance(result, tuple) else result)
        except BaseException:
            for assembly in built:
                assembly.give_up()
            raise
        return result

    def _load_plainly(self, pending: PendingLoad, error: NothingToStreamError) -> Any:
        if not self._lenient:
            raise error
        name = type(pending.model).__name__
        nbytes = sum(p.numel() * p.element_size() for p in pending.model.parameters())
        limit, held = self.request.options.memory_limit, rss_bytes()
        if held + nbytes > limit:
            raise limit_errors.whole_model_too_large(limit, name, nbytes, held) from error
        _log.info("%s has nothing that could be streamed: loaded as a whole", name)
        return pending.load_rest(())


def check_limits(request: Request) -> None:
    """Whether a model may be loaded beside those that stream.

    Raises:
        OptionError: they have other limits.
    """
    options = request.options
    give_back_inherited()
    ACCOUNTANT.check_limit(options.memory_limit)
    if options.device is not None:
        account_of(options.device).check_limit(options.device_limit)


def needs_of(pending: PendingLoad, device: Device | None, away: Collection[int] = ()) -> PassNeeds:
    """What passes of a model that is being loaded take; `away`: layers cached by other ranks."""
    model = pending.model
    return PassNeeds(
        model, model.config, products=pending.products(), away=away, **attends(device, model)
    )


def attends(device: Device | None, model: Any) -> Mapping[str, Any]:
    """How attention of a model of the library's is computed, as `PassNeeds` takes it."""
    if device is None:
        return {"attention": WrittenAttention(model, model.dtype)}
    return {"fused": device.fuses_attention(model.dtype)}


def assemble(pending: PendingLoad, request: Request) -> tuple[Assembly, Any]:
    """Plan a model that is on the meta device, and have its weights read, or left to the library.

    Returns it, hooks to come, and the library's loading report.
    """
    touched = touched_of(pending.model, pending.model)
    if request.ranks is None:
        return _assemble(pending, request, touched)
    room = partial(_room, pending, request)
    member = join(request.ranks, pending, touched, room, exact_inputs=request.exact_inputs)
    assembly: Assembly | None = None
    try:
        with member.together("it is loaded"):
            assembly, report = _assemble(pending, request, touched, member)
        share(member, assembly, pending.model)
    except BaseException:
        if assembly is not None:
            assembly.give_up()
        member.close()
        raise
    return assembly, report


def _room(pending: PendingLoad, request: Request) -> int:
    """Bytes of the limit that weights may have, about."""
    options = request.options
    reserve = reserve_bytes(needs_of(pending, None), request.hint, options.memory_limit)
    return options.memory_limit - measure(pending.files, options.io_mode).floor_bytes - reserve


def _assemble(
    pending: PendingLoad,
    request: Request,
    touched: Touched | None,
    member: Membership | None = None,
) -> tuple[Assembly, Any]:
    """`member`: this rank's share of the model, if others run the rest."""
    device = request.options.device
    needs = needs_of(pending, device, layers_elsewhere(member, pending.model))
    away = ALL_HERE if member is None else member.away
    plan = partial(plan_pending, pending, needs, touched, request, away=away)
    build = plan_to_load(plan, device)
    assembly = Assembly(
        pending, build, make_target(build), needs, request.hint, pressure=request.pressure
    )
    try:
        return assembly, pending.load_rest([weight.name for weight in build.parts.weights])
    except BaseException:
        assembly.give_up()
        raise


def finish(assembly: Assembly, model: Any, root: nn.Module | None = None) -> None:
    """Have a loaded model stream: see `Assembly.finish`."""
    assembly.finish(model, root)
    show_first_pass(assembly, model)


def plan_to_load(make: Callable[[], Build], device: Device | None) -> Build:
    """A plan for a model that is really to be loaded, and a process that is as it counts on.

    What planning itself leaves alone is done here: others give back what is over their share, and
    the process what only its start needed.
    """
    prepare_process()
    build = _plan_beside_others(make, device)
    # After cutting: trying out products of rows has made torch take on what it takes on. What
    # running needs of the libraries comes back, out of the reserve.
    lower_floor()
    return build


def _plan_beside_others(make: Callable[[], Build], device: Device | None) -> Build:
    """Others give back what is over their share.

    Raises:
        MemoryLimitError: it does not fit even so.
    """
    account = ACCOUNTANT if device is None else account_of(device)
    for _ in range(2):  # first what it cannot do without, then its share of the rest
        if not ACCOUNTANT.clients:
            break
        try:
            build = make()
            wants = build.residency.smallest, build.residency.everything
            given = account.make_room(wants, build.plan.resident - build.plan.pinned_bytes)
        except MemoryLimitError as error:
            short = error.smallest_limit - error.limit
            asked = ACCOUNTANT if error.device is None else account
            given = asked.make_room((short, short), 0)
        if not given:
            break
    try:
        return make()
    except MemoryLimitError as error:
        if error.device is None:
            error.args = (f"{error.args[0]}{ACCOUNTANT.name_holders()}",)
        raise


def plan_pending(
    pending: PendingLoad,
    needs: PassNeeds,
    touched: Touched | None,
    request: Request,
    *,
    away: Elsewhere = ALL_HERE,
) -> Build:
    """Plan a model that is on the meta device; `away` is what other ranks run."""
    model = pending.model
    device = request.options.device
    if device is not None:
        refuse_quantised(pending, device)
    if pending.disable_mmap:
        request = replace(request, options=replace(request.options, may_map=False))
    build = plan_model(
        model,
        pending.weights(),
        model.all_tied_weights_keys or {},
        touched,
        pending.files,
        needs=needs,
        request=request,
        statistics_bytes=pending.statistics_bytes(aligned if device is None else device.takes),
        away=away,
    )
    return build._replace(plan=replace(build.plan, kernel=pending.kernel()))


def plan_model(
    model: nn.Module,
    weights: Mapping[str, Weight],
    tied: Mapping[str, str],
    touched: Touched | None,
    files: Sequence[Path],
    *,
    needs: PassNeeds,
    request: Request,
    leaving: int = 0,
    statistics_bytes: int = 0,
    away: Elsewhere = ALL_HERE,
) -> Build:
    """Plan how a model is streamed.

    Nothing changes: see [Note: planning looks, loading acts] in measured_host.py.

    Args:
        model: what is to be streamed.
        weights: what can be read of it, by name.
        tied: names of parameters that share another one's memory, and that one's.
        touched: how it uses its weights, as `touched_of` gives it.
        files: the checkpoint's.
        needs: of its passes.
        request: what the user asked for.
        leaving: bytes that this process holds and will not when the model is streamed.
        statistics_bytes: of quantised weights, always there.
        away: what other ranks run.

    Raises:
        MemoryLimitError: the limit is too small; says the smallest that works.
        UnsupportedModelError: there is nothing to stream, or the device lacks a dtype.
        OptionError: the files refuse the way of reading that was asked for.
    """
    options = request.options
    device = options.device
    if device is not None:
        refuse_dtypes(model, weights, device)
    divider = Divider(
        model,
        weights,
        tied,
        experts=experts_apart(model, None if touched is None else touched.outside),
        blocks_alone=device is not None,
        beside_bytes=statistics_bytes,
        away=away,
    )
    cuttings = Cuttings(divider, touched, finely=device is None)
    code_bytes = 0 if device is None else device.code_bytes
    # After cutting: that makes torch take on what it takes on.
    measured = measure(files, options.io_mode, leaving_bytes=leaving, code_bytes=code_bytes)
    if device is None:
        reserve = reserve_bytes(needs, request.hint, options.memory_limit)
        memory = HostMemory(measured, options, reserve)
        return make_plan(cuttings, measured, options, memory, files)
    found = measure_device(device, rates=bool(options.disk_rate))
    needed = request.hint.pass_bytes(needs)
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    there = DeviceMemory(found, measured, options, needed, buffers)
    return make_plan(cuttings, measured, options, there, files)


def touched_of(model: nn.Module, probed: nn.Module | None) -> Touched | None:
    """How a trial run uses the model's weights; None where it cannot be tried.

    Plans are made several times where models share a limit; this takes longest, and is done once.
    `probed`: the same model on the meta device, None if there is no such thing.
    """
    if probed is None:
        return None
    with experts_in_turn(probed):
        usage = probe_usage(probed)
    if usage is None:
        return None
    ran = frozenset(usage.executed)
    # Nothing was learnt about modules that did not run.
    idle = (n for n, _ in model.named_parameters() if n.rpartition(".")[0] not in ran)
    return Touched(usage.touched_outside, frozenset(idle), usage.touched_past_block)
