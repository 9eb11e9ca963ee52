"""Puts a draft on a model: its own `generate` becomes one that guesses, where that fits the call.

The method becomes an attribute of the model, so that whoever calls it, PEFT and pipelines too, has
it. What it cannot take (see `hindrance`), and what comes while another thread is at it, is the
library's as ever.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import weakref
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeload.engine.guarded_methods import take_off
from pipeload.entry.draft_search import check_same_tokens, find_own_copy
from pipeload.entry.drafting import AUTO, LOOKUP, Drafting
from pipeload.entry.sources import check_source, source_of
from pipeload.errors import OptionError
from pipeload.formats.form_names import INT4, INT8
from pipeload.hf import assisted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from pipeload.entry.request import Request

_log = logging.getLogger("pipeload")


def attach_draft(
    model: Any,
    pretrained: str | os.PathLike[str],
    request: Request,
    loaded_with: Mapping[str, Any],
) -> None:
    """Have the `generate` of a model that streams use the draft that was asked for, from now on.

    `loaded_with`: the library's arguments that the model was loaded with.

    Raises:
        OptionError: the model cannot have one, or the draft has other tokens.
        CheckpointError: the draft cannot be loaded.
    """
    try:
        _attach(model, pretrained, request, loaded_with)
    except BaseException:
        model.pipeload.session.close()  # it is not to be had without what was asked for
        raise


def _attach(
    model: Any,
    pretrained: str | os.PathLike[str],
    request: Request,
    loaded_with: Mapping[str, Any],
) -> None:
    wanted = request.draft
    if not model.can_generate() or model.config.is_encoder_decoder:
        why = "has an encoder" if model.can_generate() else "does not"
        raise OptionError(
            f"draft={str(wanted)!r} is for decoders that generate text, and {type(model).__name__} "
            f"{why}. Leave it out."
        )
    named = None if wanted == LOOKUP else _named(model, pretrained, request, loaded_with)
    if named is None and wanted != LOOKUP:
        return
    if not model.pipeload.plan.bytes_per_pass:
        _log.info("nothing is guessed as long as the whole model fits the limit")
    reference = weakref.ref(model)
    drafting = Drafting(named, request, reference)
    undo = model.pipeload.session.close
    answers = {
        "generate": _generate(reference, drafting),
        assisted.MAKES_CANDIDATES: _candidates(reference),
    }
    for name, answer in answers.items():
        undo.push(partial(take_off, reference, name))
        object.__setattr__(model, name, answer)
    undo.push(drafting.end_for_good)


def _named(
    model: Any,
    pretrained: str | os.PathLike[str],
    request: Request,
    loaded_with: Mapping[str, Any],
) -> str | None:
    """The draft's folder or hub id; None if it was to be looked for, and there is none."""
    wanted = request.draft
    if wanted != AUTO:
        named = os.fspath(wanted) if wanted is not None else ""
        source, options = source_of(named)
        check_source(source, {**options, "trust_remote_code": False}, request.options.device)
        check_same_tokens(named, os.fspath(pretrained), model, loaded_with)
        return named
    if request.options.device is not None:
        _log.info("no draft is looked for: copies by `pipeload quantize` run on the CPU alone")
        return None
    found = find_own_copy(pretrained, model.pipeload.session.files)
    if found is not None:
        return str(found)
    folder = Path(os.fspath(pretrained)).name
    _log.info(
        "no draft of %s was found beside it or in the cache; this makes one: pipeload quantize %s "
        "%s-draft --method %s --group-size 32 --head %s --calibrate builtin",
        folder,
        pretrained,
        folder,
        INT4,
        INT8,
    )
    return None


def _generate(reference: weakref.ref[Any], drafting: Drafting) -> Callable[..., Any]:
    model: Any = reference()
    model_class, signature = type(model), inspect.signature(model.generate)
    del model

    @functools.wraps(model_class.generate)
    def generate(*args: Any, **kwargs: Any) -> Any:
        model = reference()
        if model is None:
            raise ReferenceError("the model is gone")
        free = not assisted.UNASSISTED.get() and drafting.is_wanted(model)
        if not free:
            return model_class.generate(model, *args, **kwargs)
        if why := assisted.hindrance(model, args, kwargs):
            drafting.tell(why)
            drafting.step_aside()
            return model_class.generate(model, *args, **kwargs)
        if not drafting.busy.acquire(blocking=False):  # another thread's; this one goes without
            return model_class.generate(model, *args, **kwargs)
        try:
            return assisted.assist(model, drafting, args, kwargs)
        finally:
            drafting.collect()
            drafting.busy.release()

    # What it takes is what the bound method does, which itself would hold the model.
    del vars(generate)["__wrapped__"]
    vars(generate)["__signature__"] = signature
    return generate


def _candidates(reference: weakref.ref[Any]) -> Callable[..., Any]:
    def candidates(*args: Any, **kwargs: Any) -> Any:
        model = reference()
        if model is None:
            raise ReferenceError("the model is gone")
        return assisted.candidates(model, *args, **kwargs)

    return candidates
