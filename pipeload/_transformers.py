"""Everything that touches a private part of transformers. Seen in 5.24.0, tried on 5.17.0 as well.

A model is built by the library's own `from_pretrained`; only the step that fills it with weights
(`PreTrainedModel._load_pretrained_model`) is taken over, for one call in one thread. Key names,
dtypes, buffers, ties, initialisation of missing weights and the loading report stay the library's.
Both methods are replaced only while somebody wants it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    convert_and_load_state_dict_in_model,
    dot_natural_key,
    rename_source_key,
)

from pipeload._arena import DTYPE_CODES, DTYPES
from pipeload._checkpoint import Checkpoint, TensorEntry, open_checkpoint
from pipeload._int4_order import kernel_order
from pipeload._layout import Conversion, Weight
from pipeload._loading_args import check_devices
from pipeload._packed_linear import INT8_ALIGNMENT, Int4Linear, Int8Linear, PackedLinear
from pipeload._repack import AS_IT_IS
from pipeload.errors import CheckpointError, OptionError, UnsupportedModelError

if TYPE_CHECKING:
    import torch

    from pipeload._bitsandbytes import PackedWeight, Prepared
    from pipeload._placement import Convert

_Loader = Callable[..., tuple[Any, Any]]
Intercept = Callable[..., Any]
"""Called with the library's `from_pretrained`, bound to a class, and what that was called with."""
_thread = threading.local()
_scoped: ContextVar[Intercept | None] = ContextVar("pipeload_intercept", default=None)
_everywhere: Intercept | None = None
_everywhere_lock = threading.Lock()


@dataclass(slots=True)
class _Recipe:
    """How one or more weights are made: the library's converter, or None for a plain rename."""

    converter: WeightConverter | None
    sources: list[tuple[TensorEntry, str]] = field(default_factory=list)
    """Stored tensors with the converter pattern that each matched."""
    keeps_dtype: bool = False
    """Whether the library leaves it in the dtype it is stored in."""


class PendingLoad:
    """A model on the meta device, and what its checkpoint holds for it."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint, config: Any) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self._config = config
        self._mapping = deepcopy(config.weight_mapping or [])  # some renamings keep state
        self._recipes = self._match_keys()
        self.packed = self._find_packed()
        """Quantised weights by name."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The checkpoint's."""
        return self.checkpoint.files

    def into(self, model: PreTrainedModel) -> PendingLoad:
        """The same for another model of the same shape."""
        return PendingLoad(model, self.checkpoint, self._config)

    def weights(self) -> dict[str, Weight]:
        """Every parameter that is read, cast or converted from the file alone, by name.

        What is not listed (buffers, shapes that do not match, shared parameters) is the library's.
        """
        parameters = dict(self.model.named_parameters())
        found = {name: packed.weight for name, packed in self.packed.items()}
        found.update(self._integers(parameters))
        for first, recipe in self._recipes.items():
            if first in found:
                continue
            names = self._targets(first, recipe)
            if all(self._usable(parameters.get(name), recipe) for name in names):
                found.update(
                    (name, self._weight(name, parameters[name], first, recipe)) for name in names
                )
        return found

    @property
    def quantised_by(self) -> str | None:
        """What has quantised the checkpoint, None for floats."""
        return _quantised_by(self._config.hf_quantizer)

    def plain_linears(self) -> dict[str, tuple[str, nn.Linear]]:
        """Linears whose weight is one stored tensor as it is: path and module by its name there."""
        found: dict[str, tuple[str, nn.Linear]] = {}
        for path, module in self.model.named_modules():
            recipe = self._recipes.get(f"{path}.weight")
            if type(module) is not nn.Linear or recipe is None or recipe.converter is not None:
                continue
            if isinstance(module.weight, nn.Parameter) and self._usable(module.weight, recipe):
                found[recipe.sources[0][0].name] = path, module
        return found

    def misshapen(self) -> list[str]:
        """Names of parameters that the checkpoint has a tensor of another shape for."""
        parameters = dict(self.model.named_parameters())
        return [
            name
            for name, recipe in self._recipes.items()
            if name in parameters
            and recipe.converter is None
            and recipe.sources[0][0].shape != tuple(parameters[name].shape)
        ]

    def source_of(self, name: str) -> TensorEntry:
        """The first stored tensor that a parameter is made of."""
        return self._recipes[name].sources[0][0]

    def _integers(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Weight]:
        """Weights of our own quantised Linears: they refuse to compute while evicted."""
        found: dict[str, Weight] = {}
        for path, module in self.model.named_modules():
            if not isinstance(module, PackedLinear):
                continue
            for leaf in ("weight", module.statistics):
                name = f"{path}.{leaf}"
                recipe = self._recipes.get(name)
                if recipe is None or not self._usable(parameters.get(name), recipe):
                    raise self._unusable(name, parameters[name], recipe)
            name = f"{path}.weight"
            weight = self._weight(name, parameters[name], name, self._recipes[name])
            (stored,) = weight.sources
            if stored.dtype != weight.dtype:
                raise self._unusable(name, parameters[name], self._recipes[name])
            repacked = None
            if isinstance(module, Int4Linear) and module.order != kernel_order():
                repacked = module.order, kernel_order()
            elif isinstance(module, Int8Linear) and stored.start % INT8_ALIGNMENT:
                repacked = AS_IT_IS
            found[name] = replace(weight, guarded=True, repacked=repacked)
        return found

    def _unusable(
        self, name: str, parameter: nn.Parameter, recipe: _Recipe | None
    ) -> CheckpointError:
        if recipe is None:
            what = f"is not in {str(self.files[0].parent)!r}"
        else:
            stored = recipe.sources[0][0]
            what = f"is {list(stored.shape)} of {stored.dtype} in {str(stored.file)!r}"
        wanted = f"{list(parameter.shape)} of {DTYPE_CODES[parameter.dtype]}"
        return CheckpointError(
            f"{name!r} of a quantised module {what}, wanted {wanted}. Quantise the model again."
        )

    def _find_packed(self) -> dict[str, PackedWeight]:
        if self.quantised_by != "bitsandbytes":
            return {}
        from pipeload._bitsandbytes import PackedWeight, is_packed

        found: dict[str, PackedWeight] = {}
        for path, module in self.model.named_modules():
            if is_packed(module):
                name = f"{path}.weight"
                recipe = self._recipes.get(name, _Recipe(None))
                parts = {pattern: entry for entry, pattern in recipe.sources}
                if recipe.keeps_dtype:  # it came alone
                    parts = {"weight": recipe.sources[0][0]}
                found[name] = PackedWeight(name, module, parts)
        return found

    def products_bytes(self) -> int:
        """The most that computing with a quantised weight takes beside its tensors."""
        item = max(
            (p.element_size() for p in self.model.parameters() if p.is_floating_point()), default=4
        )
        return max((packed.temporary_bytes(item) for packed in self.packed.values()), default=0)

    def prepared(self, name: str) -> Prepared | None:
        """What shows a quantised weight; None for any other."""
        packed = self.packed.get(name)
        return packed.prepare() if packed is not None else None

    def load_rest(self, taken: Sequence[str]) -> Any:
        """Have the library load all keys but those of `taken`; returns its loading report."""
        taken_names = set(taken)
        skip = {
            source.name
            for first, recipe in self._recipes.items()
            if first in taken_names
            for source, _ in recipe.sources
        }
        with contextlib.ExitStack() as stack:
            rest: dict[str, Any] = {}
            for file in self.checkpoint.files:
                opened = stack.enter_context(safe_open(file, framework="pt"))
                kept = [key for key in opened.keys() if key not in skip]  # noqa: SIM118 - no dict
                rest.update((key, opened.get_slice(key)) for key in kept)
            info, _ = convert_and_load_state_dict_in_model(self.model, rest, self._config, None)
        info.missing_keys.difference_update(taken_names)
        for path, module in self.model.named_modules():
            # What is streamed is put into the processor's order as it is read.
            if isinstance(module, Int4Linear) and f"{path}.weight" in taken_names:
                module.order = kernel_order()
        parameters = {name for name, _ in self.model.named_parameters()}
        owners = tuple(name.removesuffix("weight") for name in taken_names & self.packed.keys())
        # The statistics of a quantised weight, which its module counts as its own.
        info.missing_keys -= {
            key for key in info.missing_keys - parameters if owners and key.startswith(owners)
        }
        # Kept for saving after remove(): a conversion counts as used when any key matched it.
        pairs = zip(self._config.weight_mapping or [], self._mapping, strict=True)
        used = [original for original, copy in pairs if original.was_used() or copy.was_used()]
        object.__setattr__(self.model, "_weight_conversions", used)
        return info

    def finish(self, info: Any) -> None:
        """Have the library initialise what `load_rest` has not loaded, as it does for its own."""
        type(self.model)._finalize_model_loading(self.model, self._config, info)

    def converter(self) -> Convert:
        """The library's operations as a function; holds the model weakly."""
        recipes, model = self._recipes, weakref.ref(self.model)

        def convert(
            conversion: Conversion, stored: Mapping[str, torch.Tensor]
        ) -> Mapping[str, torch.Tensor]:
            first = conversion.weights[0].group or ""
            dtype = DTYPES[conversion.weights[0].dtype]
            operation = deepcopy(recipes[first].converter)
            if operation is None:
                raise UnsupportedModelError(f"no conversion is known for {first!r}")
            for source, pattern in recipes[first].sources:
                tensor = stored[source.name]
                # The same order as the library's: cast what was read, then convert.
                cast: Any = partial(tensor.to, dtype)
                operation.add_tensor(first, source.name, pattern, cast)
            owner = model()
            made = operation.convert(
                first, model=owner, config=owner.config if owner is not None else None
            )
            return {
                name: value[0] if isinstance(value, list) else value for name, value in made.items()
            }

        return convert

    def _match_keys(self) -> dict[str, _Recipe]:
        renamings = [entry for entry in self._mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in self._mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
        state = self.model.state_dict()
        prefix = self.model.base_model_prefix
        recipes: dict[str, _Recipe] = {}
        # The library's order: experts must arrive in the order of their numbers.
        for key in sorted(self.checkpoint.entries, key=dot_natural_key):
            target, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if target not in state and key in state:
                target, pattern = rename_source_key(key, [], [], prefix, state)
            if target in state:
                recipe = recipes.setdefault(target, _Recipe(by_pattern.get(pattern or "")))
                recipe.sources.append((self.checkpoint.entries[key], pattern or key))
        for recipe in recipes.values():
            if len(recipe.sources) == 1 and _collects_statistics(recipe.converter):
                recipe.converter, recipe.keeps_dtype = None, True
        return recipes

    def _targets(self, first: str, recipe: _Recipe) -> list[str]:
        if recipe.converter is None:
            return [first]
        patterns = recipe.converter.target_patterns
        return [first.replace(patterns[0], pattern) for pattern in patterns]

    def _usable(self, parameter: nn.Parameter | None, recipe: _Recipe) -> bool:
        if parameter is None or parameter.dtype not in DTYPE_CODES:
            return False
        if any(source.dtype not in DTYPES for source, _ in recipe.sources):
            return False
        if recipe.converter is not None:
            return parameter.is_floating_point()
        return len(recipe.sources) == 1 and recipe.sources[0][0].shape == tuple(parameter.shape)

    def _weight(self, name: str, parameter: nn.Parameter, first: str, recipe: _Recipe) -> Weight:
        dtype = self._target_dtype(name if recipe.converter is None else first, parameter)
        if recipe.keeps_dtype:
            dtype = DTYPES[recipe.sources[0][0].dtype]
        return Weight(
            name=name,
            dtype=DTYPE_CODES[dtype],
            shape=tuple(parameter.shape),
            nbytes=parameter.numel() * dtype.itemsize,
            sources=tuple(source for source, _ in recipe.sources),
            group=None if recipe.converter is None else first,
        )

    def _target_dtype(self, name: str, parameter: nn.Parameter) -> torch.dtype:
        """The library's rule: modules kept in fp32 are not visible in the meta parameter."""
        plan = self._config.dtype_plan
        if plan:
            matcher, groups, _ = build_glob_alternation(list(plan))
            if (match := matcher.search(name)) and match.lastgroup is not None:
                dtype: torch.dtype = plan[groups[match.lastgroup]]
                return dtype
        return parameter.dtype


@contextlib.contextmanager
def take_over_loading(stream: Callable[[PendingLoad], Any]) -> Iterator[None]:
    """Inside, this thread's next `from_pretrained` gives its meta model to `stream`.

    `stream` must fill or replace every parameter and return the library's loading report.
    """
    with _LOAD:
        _thread.pending = stream
        try:
            yield
        finally:
            _thread.pending = None


class _Found(Exception):  # noqa: N818 - carries a result out of the library's loader
    def __init__(self, pending: PendingLoad) -> None:
        super().__init__()
        self.pending = pending


def peek(load: Callable[[], object]) -> PendingLoad | None:
    """What `load`'s `from_pretrained` was about to fill with weights; None if it loads none.

    Whoever may answer for it is not asked. No weights are read.
    """

    def stop(pending: PendingLoad) -> Any:
        raise _Found(pending)

    try:
        with intercept_loading(plainly), take_over_loading(stop):
            load()
    except _Found as found:
        return found.pending
    return None


@contextlib.contextmanager
def intercept_loading(intercept: Intercept) -> Iterator[None]:
    """Inside, in this context, every `from_pretrained` of every class is `intercept`'s to answer.

    It is called with the library's own function, bound to the class, and what that was called with.
    Models that one loads while it is loaded are left to the library.
    """
    with _FROM_PRETRAINED:
        before = _scoped.get()
        _scoped.set(intercept)
        try:
            yield
        finally:
            # Not `reset`: a notebook leaves a context in another one than it entered it in.
            _scoped.set(before)


def intercept_everywhere(intercept: Intercept | None) -> None:
    """The same in all threads, wherever `intercept_loading` says nothing, until it is None."""
    global _everywhere  # noqa: PLW0603 - what it is for
    with _everywhere_lock:
        if intercept is not None and _everywhere is None:
            _FROM_PRETRAINED.install()
        elif intercept is None and _everywhere is not None:
            _FROM_PRETRAINED.uninstall()
        _everywhere = intercept


def current_intercept() -> Intercept | None:
    """Who would answer a `from_pretrained` that is called here and now."""
    return _scoped.get() or _everywhere


def plainly(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """An `Intercept` that leaves it to the library."""
    return load(*args, **kwargs)


class _Patch:
    """A method of `PreTrainedModel` that is another one while anybody needs it to be."""

    def __init__(self, name: str, replacement: Any) -> None:
        self._name, self._replacement = name, replacement
        self._lock = threading.Lock()
        self._users = 0
        self.original: Any = PreTrainedModel.__dict__[name]
        """What it was when it was replaced last: a classmethod or staticmethod."""

    def install(self) -> None:
        """Needed by one more."""
        with self._lock:
            self._users += 1
            if self._users == 1 and not self._installed:
                self.original = PreTrainedModel.__dict__[self._name]
                setattr(PreTrainedModel, self._name, self._replacement)

    def uninstall(self) -> None:
        """Needed by one less."""
        with self._lock:
            self._users -= 1
            # What somebody else has put there since stays; it calls ours, which then does nothing.
            if not self._users and self._installed:
                setattr(PreTrainedModel, self._name, self.original)

    @property
    def _installed(self) -> bool:
        return PreTrainedModel.__dict__[self._name] is self._replacement

    def __enter__(self) -> None:
        self.install()

    def __exit__(self, *_: object) -> None:
        self.uninstall()


@functools.wraps(PreTrainedModel.from_pretrained.__func__)  # type: ignore[attr-defined]
def _from_pretrained(cls: type[PreTrainedModel], *args: Any, **kwargs: Any) -> Any:
    load = partial(_FROM_PRETRAINED.original.__func__, cls)
    intercept = current_intercept()
    if intercept is None:
        return load(*args, **kwargs)
    with intercept_loading(plainly):
        return intercept(load, *args, **kwargs)


def _load(
    model: PreTrainedModel,
    state_dict: dict[str, Any] | None,
    checkpoint_files: list[str] | None,
    load_config: Any,
    expected_keys: list[str] | None = None,
) -> tuple[Any, Any]:
    stream = getattr(_thread, "pending", None)
    if stream is None:
        load: _Loader = _LOAD.original.__func__
        return load(model, state_dict, checkpoint_files, load_config, expected_keys)
    _thread.pending = None  # one shot: models that this one loads inside are plain
    if state_dict is not None or not checkpoint_files:
        raise OptionError(
            "state_dict= cannot be streamed: its weights are in memory already. Pass a checkpoint."
        )
    _refuse_quantised(load_config)
    check_devices("device_map", load_config.device_map or {})
    _refuse_pickled(checkpoint_files)
    index = (load_config.sharded_metadata or {}).get("weight_map")
    checkpoint = open_checkpoint([Path(file) for file in checkpoint_files], index)
    return stream(PendingLoad(model, checkpoint, load_config)), None


_LOAD = _Patch("_load_pretrained_model", staticmethod(_load))
_FROM_PRETRAINED = _Patch("from_pretrained", classmethod(_from_pretrained))


def _collects_statistics(converter: WeightConverter | None) -> bool:
    """Whether a converter puts a quantised weight together; those that come alone pass it as is."""
    operations = converter.operations if converter is not None else []
    return bool(operations) and all(getattr(op, "hf_quantizer", None) for op in operations)


_STREAMED_METHODS = {"bitsandbytes", "pipeload"}


def _quantised_by(quantizer: Any) -> str | None:
    if quantizer is None:
        return None
    method = quantizer.quantization_config.quant_method
    return str(getattr(method, "value", method))


def _refuse_quantised(load_config: Any) -> None:
    quantizer = load_config.hf_quantizer
    name = _quantised_by(quantizer)
    if name is None:
        return
    if not quantizer.pre_quantized:
        raise UnsupportedModelError(
            f"quantization_config= for {name!r} quantises weights while they are loaded, which "
            "needs all of them in memory. Leave it out, or load a checkpoint that is quantised "
            "already: `pipeload quantize SRC DST --method int8` makes one."
        )
    if name not in _STREAMED_METHODS:
        raise UnsupportedModelError(
            f"checkpoints quantised by {name!r} cannot be streamed by this version. Use the "
            "model's float checkpoint (bf16, fp16 or fp32), one quantised by bitsandbytes, or one "
            "that `pipeload quantize` has made of the float one."
        )


def _refuse_pickled(files: Sequence[str]) -> None:
    for file in files:
        if not file.endswith(".safetensors"):
            raise CheckpointError(
                f"{Path(file).name!r} is a pickled checkpoint: loading it can run code, and it "
                "cannot be streamed. If you trust it, convert it once: "
                "AutoModelForCausalLM.from_pretrained(SOURCE).save_pretrained(TARGET), then "
                "load TARGET."
            )


def pretrained_modules(model: nn.Module) -> list[PreTrainedModel]:
    """Every library model in the tree, outermost first: a pass may begin at any of them."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


AUTO_COMPILE = "_valid_auto_compile_criteria"


def disable_auto_compile(model: PreTrainedModel) -> None:
    """Keep `generate` from compiling: hooks and graphs do not mix. Set as an attribute."""

    def never(*_args: object, **_kwargs: object) -> bool:
        return False

    object.__setattr__(model, AUTO_COMPILE, never)
