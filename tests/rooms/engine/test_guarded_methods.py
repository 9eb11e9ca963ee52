"""What cannot work while weights are on disk is refused, whole, with a way out."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

import pipeload
from pipeload import OptionError, UnsupportedOperationError
from tests.support.models import load_plain
from tests.support.streaming import (
    IDS,
    WAIT_SECONDS,
    assert_nothing_held,
    generated,
    in_thread,
    load_streamed,
    logits,
    our_threads,
    wait_for_threads,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.conftest import TinyCheckpoint


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return load_plain(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    """A streamed model that every test here must leave as it was."""
    return load_streamed(folder)


@pytest.fixture(autouse=True)
def still_right(model: Any, plain: Any) -> Any:
    """Whatever was refused: nothing has changed."""
    yield
    assert torch.equal(logits(model), logits(plain))
    assert_nothing_held(model)


def tampered(plain: Any) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in plain.state_dict().items()}


def clones(state: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in state.values()]


REFUSED: dict[str, Callable[[Any, Any, Path], object]] = {
    "save_pretrained": lambda model, _plain, path: model.save_pretrained(path),
    "inner save_pretrained": lambda model, _plain, path: model.model.save_pretrained(path),
    "state_dict": lambda model, _plain, _path: torch.save(model.state_dict(), io.BytesIO()),
    "kept state_dict": lambda model, _plain, _path: copy.deepcopy(model.state_dict(keep_vars=True)),
    "safetensors": lambda model, _plain, path: save_file(model.state_dict(), f"{path}.file"),
    "block state_dict": lambda model, _plain, _path: clones(model.model.layers[2].state_dict()),
    "list state_dict": lambda model, _plain, _path: clones(model.model.layers.state_dict()),
    "inner state_dict": lambda model, _plain, _path: (
        model.model.layers[3].mlp.up_proj.state_dict()["weight"].numpy()
    ),
    "load_state_dict": lambda model, plain, _path: model.load_state_dict(tampered(plain)),
    "assigned": lambda model, plain, _path: model.load_state_dict(tampered(plain), assign=True),
    "block load_state_dict": lambda model, plain, _path: model.model.layers[2].load_state_dict(
        tampered(plain.model.layers[2])
    ),
    "half": lambda model, _plain, _path: model.half(),
    "double": lambda model, _plain, _path: model.double(),
    "bfloat16": lambda model, _plain, _path: model.bfloat16(),
    "type": lambda model, _plain, _path: model.type(torch.float16),
    "to dtype": lambda model, _plain, _path: model.to(torch.float16),
    "to device": lambda model, _plain, _path: model.to("meta"),
    "block to": lambda model, _plain, _path: model.model.layers[1].to(torch.float16),
    "list to": lambda model, _plain, _path: model.model.layers.to(torch.float16),
    "to_empty": lambda model, _plain, _path: model.to_empty(device="cpu"),
    "share_memory": lambda model, _plain, _path: model.share_memory(),
    "deepcopy": lambda model, _plain, _path: copy.deepcopy(model),
    "block deepcopy": lambda model, _plain, _path: copy.deepcopy(model.model.layers[1]),
    "list deepcopy": lambda model, _plain, _path: copy.deepcopy(model.model.layers),
    "pickle": lambda model, _plain, _path: pickle.dumps(model),
    "torch.save": lambda model, _plain, _path: torch.save(model, io.BytesIO()),
    "block torch.save": lambda model, _plain, _path: torch.save(
        model.model.layers[0], io.BytesIO()
    ),
    "resize_token_embeddings": lambda model, _plain, _path: model.resize_token_embeddings(600),
    "compile": lambda model, _plain, _path: model.compile(),
    "block compile": lambda model, _plain, _path: model.model.layers[0].compile(),
    "training": lambda model, _plain, _path: model.train()(IDS, labels=IDS),
    "grad mode": lambda model, _plain, _path: model(IDS),
    "input grad": lambda model, _plain, _path: model(
        inputs_embeds=torch.zeros(1, 2, 96, requires_grad=True)
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, model: Any, plain: Any, tmp_path: Path) -> None:
    """The error says what to do instead, and nothing was written or changed."""
    before = {key: id(parameter) for key, parameter in model.named_parameters()}
    try:
        with pytest.raises(UnsupportedOperationError, match=r"remove\(\)|no_grad|Load it twice"):
            REFUSED[name](model, plain, tmp_path / "saved")
    finally:
        model.eval()
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == before
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert not (tmp_path / "saved" / "model.safetensors").exists()


def test_loading_what_is_there_does_nothing(model: Any, plain: Any) -> None:
    """Saved adapters hold weights of the checkpoint, too, and must load."""
    before = {key: id(parameter) for key, parameter in model.named_parameters()}
    for assign in (False, True):
        model.load_state_dict(plain.state_dict(), assign=assign)
        model.model.layers[2].load_state_dict(plain.model.layers[2].state_dict(), assign=assign)
    assert {key: id(parameter) for key, parameter in model.named_parameters()} == before


def test_moving_to_where_it_is_does_nothing(model: Any) -> None:
    """Scripts call to(device) and float() as a matter of course."""
    assert model.to("cpu") is model
    assert model.to(torch.float32) is model
    assert model.float() is model
    assert model.cpu() is model
    assert model.to(device="cpu", dtype=torch.float32) is model
    assert model.eval() is model


@pytest.mark.skipif(torch.accelerator.is_available(), reason="cuda() has something to move to")
def test_cuda_without_a_device(model: Any) -> None:
    """The error is torch's own, and nothing has moved."""
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|NVIDIA|cuda"):
        model.cuda()


def test_frozen_weights_record_nothing(folder: Path, plain: Any) -> None:
    """With requires_grad_(False), grad mode is harmless and works."""
    model = load_streamed(folder)
    model.requires_grad_(False)
    assert torch.equal(model(IDS).logits, logits(plain))


# What dynamo says when it comes by the hooks, once in a process.
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
@pytest.mark.parametrize("whole", [True, False])
def test_torch_compile_is_refused(folder: Path, plain: Any, whole: bool) -> None:
    """Around a streamed model or one block of it; the model itself goes on."""
    torch._dynamo.reset()
    model = load_streamed(folder)
    if whole:
        compiled: Any = torch.compile(model, backend="eager")
    else:
        compiled = model
        original = model.model.layers[2]
        model.model.layers[2] = torch.compile(original, backend="eager")
    for _ in range(2):
        with pytest.raises(UnsupportedOperationError, match=r"torch\.compile .*remove\(\)"):
            logits(compiled)
    if not whole:
        model.model.layers[2] = original
    assert torch.equal(logits(model), logits(plain))
    assert_nothing_held(model)


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace:UserWarning")
def test_torch_compile_after_everything_is_resident(folder: Path, plain: Any) -> None:
    """No hook is left on any block by then, so it works as ever."""
    torch._dynamo.reset()
    model = load_streamed(folder, spare=10_000_000)
    logits(model)
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(logits(compiled), logits(plain))


def test_the_handle(model: Any, plain: Any) -> None:
    """It is found from the model and from any module around it; without one, the error says so."""
    handle = pipeload.handle(model)
    assert isinstance(handle, pipeload.Handle)
    assert handle is model.pipeload
    assert pipeload.handle(torch.nn.Sequential(model)) is handle
    assert not handle.removed
    assert "7 units" in repr(handle)
    with pytest.raises(OptionError, match=r"LlamaForCausalLM is not streamed.*from_pretrained"):
        pipeload.handle(plain)


@pytest.mark.parametrize("spare", [0, 700_000, 10_000_000])
@pytest.mark.parametrize("passes", [0, 2])
def test_remove_gives_the_plain_model_back(
    folder: Path, plain: Any, tmp_path: Path, spare: int, passes: int
) -> None:
    """Exact, without a trace, from the start or later, streamed or resident."""
    threads = our_threads()  # those of an earlier test may still end
    model = load_streamed(folder, spare=spare)
    with model.pipeload as handle:
        for _ in range(passes):
            logits(model)
    assert handle.removed
    handle.remove()
    wait_for_threads(threads)
    assert not hasattr(model, "pipeload")
    state = plain.state_dict()
    assert model.state_dict().keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for module, original in zip(model.modules(), plain.modules(), strict=True):
        assert_same_attributes(module, original)
    assert torch.equal(logits(model), logits(plain))
    assert generated(model) == generated(plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_plain(tmp_path)), logits(plain))
    loss = model.train()(IDS, labels=IDS).loss
    loss.backward()
    assert model.model.layers[3].mlp.up_proj.weight.grad is not None
    assert handle.stats().passes == passes


def assert_same_attributes(module: Any, plain: Any) -> None:
    """No hook, no override, nothing else on the module that a plain one does not have."""
    extra = set(vars(module)) - set(vars(plain)) - {"_weight_conversions"}
    assert extra == set(), module
    for name, value in vars(plain).items():
        if "hooks" in name:
            assert len(vars(module)[name]) == len(value), (module, name)


def test_remove_under_a_running_pass(folder: Path, plain: Any) -> None:
    """It is refused, and the pass ends well; afterwards it works."""
    model = load_streamed(folder)
    inside, go_on = threading.Event(), threading.Event()

    def stop(*_args: object) -> None:
        inside.set()
        assert go_on.wait(WAIT_SECONDS)

    hook = model.model.layers[3].mlp.register_forward_pre_hook(stop)
    running = in_thread(logits, model)
    assert inside.wait(WAIT_SECONDS)
    with pytest.raises(UnsupportedOperationError, match="forward pass is running"):
        model.pipeload.remove()
    go_on.set()
    assert torch.equal(running.result(WAIT_SECONDS), logits(plain))
    hook.remove()
    model.pipeload.remove()
    assert torch.equal(logits(model), logits(plain))


def test_remove_after_a_cast(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cast weights cannot be mapped: they must fit the limit, or the model goes on streaming."""
    folder = tiny("llama", "bf16")
    expected = logits(load_plain(folder, dtype=torch.float32))
    model = load_streamed(folder, dtype=torch.float32)
    assert torch.equal(logits(model), expected)
    handle = pipeload.handle(model)
    with monkeypatch.context() as patch:
        patch.setattr("pipeload.engine.restore.rss_bytes", lambda: handle.plan.memory_limit)
        with pytest.raises(pipeload.MemoryLimitError, match="still streams") as refusal:
            handle.remove()
        assert refusal.value.smallest_limit > handle.plan.memory_limit
    assert torch.equal(logits(model), expected)
    handle.remove()
    assert torch.equal(logits(model), expected)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits(load_plain(tmp_path)), expected)


def test_adapters_may_load_their_own(folder: Path) -> None:
    """load_state_dict() of what is not in the checkpoint passes the guard."""
    model = load_streamed(folder)
    layer = model.model.layers[2]
    layer.extra = torch.nn.Linear(2, 2)
    model.load_state_dict({"model.layers.2.extra.bias": torch.ones(2)}, strict=False)
    assert layer.extra.bias.tolist() == [1, 1]
    with pytest.raises(UnsupportedOperationError, match=r"model\.layers\.2\.mlp\.up_proj\.weight"):
        model.load_state_dict({"model.layers.2.mlp.up_proj.weight": torch.ones(2)}, strict=False)
