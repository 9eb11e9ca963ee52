"""What users hang on a model and read from it: the same as on a plain one."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch

from pipeload import UnsupportedOperationError
from tests.support.exact import assert_same, prompt
from tests.support.models import load_plain
from tests.support.streaming import assert_nothing_held, logits
from tests.support.users import Pair, load_by, scores

if TYPE_CHECKING:
    from tests.conftest import TinyCheckpoint

GREEDY: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False}


# -- hooks ----------------------------------------------------------------------------------------


def watched(model: Any) -> list[tuple[str, torch.nn.Module]]:
    kinds = (torch.nn.Linear, torch.nn.Embedding)
    named: list[tuple[str, torch.nn.Module]] = list(model.named_modules())
    return [
        (name, module)
        for name, module in named
        if isinstance(module, kinds) or name.endswith(("mlp", "self_attn", "norm"))
    ]


@pytest.mark.parametrize("prepend", [False, True])
def test_activations(pair: Pair, prepend: bool) -> None:
    """What goes into and comes out of every Linear, Embedding and module of a block."""

    def captured(model: Any) -> dict[str, Any]:
        found: dict[str, Any] = {}
        hooks = []
        for name, module in watched(model):

            def before(_module: Any, args: Any, kwargs: Any, name: str = name) -> None:
                given = args or (kwargs.get("hidden_states"),)
                found[f"{name} in"] = given[0].clone()

            def after(_module: Any, _args: Any, output: Any, name: str = name) -> None:
                out = output[0] if isinstance(output, tuple) else output
                found[f"{name} out"] = out.clone()

            hooks.append(
                module.register_forward_pre_hook(before, with_kwargs=True, prepend=prepend)
            )
            hooks.append(module.register_forward_hook(after, prepend=prepend))
        scores(model)
        for hook in hooks:
            hook.remove()
        return found

    assert len(pair.check(captured)) > 100
    pair.check(scores)
    pair.check(captured)


def test_hooks_for_all_modules(pair: Pair) -> None:
    """torch's own, for every module there is: profilers register them."""

    def captured(model: Any) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def after(module: Any, _args: Any, output: Any) -> None:
            if isinstance(module, torch.nn.Linear):
                found.append(output.clone())

        hook = torch.nn.modules.module.register_module_forward_hook(after)
        try:
            scores(model)
        finally:
            hook.remove()
        return found

    pair.check(captured)


def test_steering(pair: Pair) -> None:
    """Hooks that change what they see: inputs and outputs of Linear modules and of blocks."""
    push = torch.randn(96, generator=torch.Generator().manual_seed(3)) / 10

    def steered(model: Any) -> list[Any]:
        layers = model.model.layers
        hooks = [
            layers[1].self_attn.q_proj.register_forward_pre_hook(
                lambda _m, args: (args[0] + push,)
            ),
            layers[2].mlp.down_proj.register_forward_hook(
                lambda _m, _a, output: output * 1.5 + push
            ),
            layers[4].register_forward_hook(lambda _m, _a, output: output - push),
            model.lm_head.register_forward_hook(lambda _m, _a, output: output.tanh()),
            model.model.embed_tokens.register_forward_hook(lambda _m, _a, output: output + push),
        ]
        found = [*scores(model), model.generate(prompt(), **GREEDY)]
        for hook in hooks:
            hook.remove()
        return [*found, *scores(model)]

    found = pair.check(steered)
    assert not torch.equal(found[0], found[-2])


# -- what is read from a model --------------------------------------------------------------------


@pytest.mark.parametrize("passes", [0, 1])
def test_what_is_read(pair: Pair, passes: int) -> None:
    """Names, counts, sizes and settings, before the first pass and after it."""

    def facts(model: Any) -> dict[str, Any]:
        return {
            "parameters": [
                (name, tuple(p.shape), str(p.dtype), str(p.device), p.requires_grad, p.numel())
                for name, p in model.named_parameters()
            ],
            "tied": len(list(model.named_parameters(remove_duplicate=False))),
            "buffers": [(name, str(b.dtype), b.sum().item()) for name, b in model.named_buffers()],
            "modules": [(name, type(module).__name__) for name, module in model.named_modules()],
            "counts": [
                model.num_parameters(),
                model.num_parameters(only_trainable=True),
                model.num_parameters(exclude_embeddings=True),
                model.get_memory_footprint(),
                sum(p.numel() * p.element_size() for p in model.parameters()),
            ],
            "where": [str(model.device), str(model.dtype), hasattr(model, "hf_device_map")],
            "text": repr(model),
            "config": copy.deepcopy(model.config).to_dict(),
            "generation": model.generation_config.to_dict(),
            "training": [model.training, model.can_generate(), model.name_or_path],
            "main input": [model.main_input_name, model.base_model_prefix, type(model).__name__],
        }

    for model in (pair.plain, pair.model):
        for _ in range(passes):
            scores(model)
    assert facts(pair.model) == facts(pair.plain)
    pair.check(scores)


def test_casting_buffers_alone(way: str, tiny: TinyCheckpoint) -> None:
    """`to(dtype)` of a model that has it already casts its fp32 buffers, as on a plain model."""
    folder = tiny("llama", "bf16")
    pair = Pair(load_plain(folder), load_by(way, folder))
    before = pair.check(scores)

    def cast(model: Any) -> list[Any]:
        for same in (model.to(torch.bfloat16), model.bfloat16(), model.to("cpu", torch.bfloat16)):
            assert same is model
        return [*(buffer.clone() for buffer in model.buffers()), *scores(model)]

    *buffers, first, _ = pair.check(cast)
    assert {buffer.dtype for buffer in buffers} == {torch.bfloat16}
    assert not torch.equal(first, before[0])  # positions are less exact now, on both


@pytest.mark.parametrize("passes", [0, 1])
def test_functional_call(pair: Pair, passes: int) -> None:
    """With the model's own parameters; copies of what is on disk are refused by name."""
    wanted = logits(pair.plain, prompt())
    for _ in range(passes):
        scores(pair.model)
    own = dict(pair.model.named_parameters())
    copies = {name: parameter.detach() for name, parameter in own.items()}
    with torch.no_grad():
        assert_same(torch.func.functional_call(pair.model, own, (prompt(),)).logits, wanted)
        with pytest.raises(UnsupportedOperationError, match=r"functional_call\(\) needs"):
            torch.func.functional_call(pair.model, copies, (prompt(),))
    assert_nothing_held(pair.model)
    pair.check(scores)
