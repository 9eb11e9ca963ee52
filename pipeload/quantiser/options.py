"""What of a model is quantised, and to what: the options of `pipeload.quantize`, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from pipeload.errors import OptionError, UnsupportedModelError
from pipeload.formats.form_names import FORMS, INT8
from pipeload.formats.integers.rounding import GROUPS, ZERO_POINTS
from pipeload.quantiser import experts
from pipeload.quantiser.experts import FLOATS
from pipeload.quantiser.forms import HEAD_BITS, Form, FourBitForm, IntegerForm
from pipeload.quantiser.four_bits import KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.experts import Experts

HEADS = ("float", INT8)
"""What becomes of the output head."""


class Head(NamedTuple):
    """An output head that becomes int8."""

    path: str
    """In the model."""
    name: str
    """Of its weight in the checkpoint that is made."""
    source: str
    """Of the stored tensor that it is made of: the embedding's, where both are one."""
    module: nn.Linear
    form: IntegerForm

    @property
    def is_tied(self) -> bool:
        """Whether it has shared the embedding's weight so far."""
        return self.name != self.source


class Choice(NamedTuple):
    """Linears and experts of a model. The first two by the names of their stored weights."""

    linears: dict[str, nn.Linear]
    """That are quantised."""
    paths: dict[str, str]
    """Where they are in the model."""
    kept: list[str]
    """Paths of the others, and of experts that stay floats though they look like those below."""
    head: Head | None
    """It is among neither."""
    experts: list[Experts]
    """Modules whose experts are quantised."""


def _check(name: str, value: object, allowed: Sequence[object]) -> None:
    if value not in allowed:
        raise OptionError(
            f"{name}={value!r} is unknown. Choose one of "
            f"{', '.join(repr(one) for one in allowed if one is not None)}."
        )


def make_form(
    method: str,
    *,
    group_size: int | None,
    zero_points: str | None,
    double_quant: bool,
    calibrate: str | None,
    gptq: bool,
    mixed: bool = False,
) -> Form:
    """What the options ask for; `mixed`: a size for all Linears, which tells the groups of each.

    Raises:
        OptionError: one means nothing, or would change nothing.
    """
    _check("method", method, FORMS)
    _check("group_size", group_size, (None, *GROUPS))
    _check("zero_points", zero_points, (None, *ZERO_POINTS))
    if method != "int4":
        _refuse_given(
            method, "int4", group_size=group_size, zero_points=zero_points, gptq=gptq or None
        )
        if mixed:
            raise OptionError(
                f'size is of method="int4", some of whose Linears become int8, and not of '
                f"{method!r}. Leave it out."
            )
    if method in KINDS:
        _refuse_given(method, "int4 and int8", calibrate=calibrate)
        return FourBitForm(method, double=double_quant)
    _refuse_given(method, "nf4 and fp4", double_quant=double_quant or None)
    bits = 4 if method == "int4" else 8
    if calibrate is not None and zero_points not in {None, ZERO_POINTS[0]}:
        raise OptionError(
            f"zero_points={zero_points!r} looks at no data, so calibrate={calibrate!r} would "
            "change nothing. Leave one of them out."
        )
    if gptq and calibrate is None:
        raise OptionError(
            "gptq=True would change nothing without a text, which tells how inputs go together. "
            'Give calibrate="builtin", or a file.'
        )
    if mixed and group_size is not None:
        raise OptionError(
            f"group_size={group_size} would change nothing with a size, which tells the groups of "
            "each Linear. Leave one of them out."
        )
    if mixed and calibrate is None:
        raise OptionError(
            "a size needs a text, which tells what each Linear is worth. Leave calibrate out, or "
            "give a file."
        )
    return IntegerForm(
        bits,
        gptq=gptq,
        mixed=mixed,
        group=min(GROUPS) if mixed else group_size or 64,
        zero_points=zero_points or ZERO_POINTS[0],
        calibrated=calibrate is not None,
    )


def _refuse_given(method: str, others: str, **options: object) -> None:
    for name, value in options.items():
        if value is not None:
            raise OptionError(
                f"{name}={value!r} is of {others}, and would change nothing with "
                f"method={method!r}. Leave it out."
            )


def make_head_form(head: str | None, method: str) -> IntegerForm | None:
    """What the option for the head asks for.

    Raises:
        OptionError: it means nothing, or would change nothing.
    """
    _check("head", head, (None, *HEADS))
    if head != INT8:
        return None
    if method in KINDS:
        _refuse_given(method, "int4 and int8", head=head)
    return IntegerForm(HEAD_BITS, group=0, zero_points=ZERO_POINTS[0], calibrated=False)


def find_head(pending: PendingLoad, form: IntegerForm) -> Head:
    """The output head, which is to become that form.

    Raises:
        UnsupportedModelError: the model has none, or one that cannot be.
    """
    model = pending.model
    module = model.get_output_embeddings()
    path = next((path for path, one in model.named_modules() if one is module), None)
    if type(module) is not torch.nn.Linear or path is None or not form.fits(module):
        raise UnsupportedModelError(
            f"{type(model).__name__} has no output head that could be {form.name}: it takes a "
            f"Linear with {form.wants}. Leave --head out."
        )
    name = f"{path}.weight"
    owner = (model.all_tied_weights_keys or {}).get(name, name)
    if owner != name and name in pending.checkpoint.entries:
        # The library ties both only where they are equal, which nobody knows without reading them.
        raise UnsupportedModelError(
            f"the output head of {type(model).__name__}, {name!r}, is to be the embedding, and is "
            "stored beside it all the same. Leave --head out."
        )
    found = {parameter: source for source, parameter in pending.plain_parameters().items()}
    source = found.get(owner)
    if source is None or pending.checkpoint.entries[source].dtype not in FLOATS:
        raise UnsupportedModelError(
            f"the output head of {type(model).__name__}, {name!r}, is no float tensor of the "
            "checkpoint as it is. Leave --head out."
        )
    return Head(path, name if owner != name else source, source, module, form)


def choose(pending: PendingLoad, form: Form, head_form: IntegerForm | None) -> Choice:
    """What of a model is quantised; `head_form`: to what its output head is.

    Raises:
        UnsupportedModelError: nothing can be.
    """
    as_integers = None if head_form is None else find_head(pending, head_form)
    model = pending.model
    head = model.get_output_embeddings()
    tied = {*(model.all_tied_weights_keys or {})} | {*(model.all_tied_weights_keys or {}).values()}
    stored = pending.plain_linears()
    chosen: dict[str, nn.Linear] = {}
    paths: dict[str, str] = {}
    for name, (path, module) in stored.items():
        float_weight = pending.checkpoint.entries[name].dtype in FLOATS
        mine = module is not head and f"{path}.weight" not in tied and name.endswith("weight")
        if mine and float_weight and form.fits(module):
            chosen[name], paths[name] = module, path
    taken = {id(module) for module in chosen.values()}
    taken |= {id(head)} if as_integers is not None else set()
    linears = [(p, m) for p, m in model.named_modules() if type(m) is torch.nn.Linear]
    kept = [path for path, module in linears if id(module) not in taken]
    packed: list[Experts] = []
    if form.for_experts is not None:
        packed = experts.find(pending, form.for_experts)
        kept += experts.left(model, packed, form.for_experts)
    if not chosen and not packed:
        shapes = sorted({tuple(m.weight.shape) for _, m in linears if m is not head})
        why = f"its Linears are {shapes[:4]}" if shapes else "it has no Linears"
        raise UnsupportedModelError(
            f"{type(model).__name__} has nothing that {form.name} could be made of: {why}, "
            f"and it takes Linears with {form.wants}. Try another method, or stream it as it is."
        )
    return Choice(chosen, paths, kept, as_integers, packed)
