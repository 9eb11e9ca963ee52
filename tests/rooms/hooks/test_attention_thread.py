"""Attention in a thread of its own: the same bits, and threads that end."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pipeload_hooks import AttentionAside, _attention_thread

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def aside(monkeypatch: pytest.MonkeyPatch) -> Iterator[AttentionAside]:
    """On a processor where kernels stay, for all that is here; active."""
    monkeypatch.setattr(_attention_thread, "kernels_stay", lambda dtype: dtype is torch.bfloat16)
    mode = AttentionAside()
    mode.begin()
    yield mode
    mode.discard()
    mode.close()


def tensors(length: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(length)
    return [torch.randn(1, 4, length, 32, generator=made).to(dtype) for _ in range(3)]


def attend(length: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> torch.Tensor:
    query, key, value = tensors(length, dtype)
    return functional.scaled_dot_product_attention(query, key, value, **options)


def threads() -> set[threading.Thread]:
    """Threads of ours."""
    return {
        thread for thread in threading.enumerate() if thread.name.startswith("pipeload-attention")
    }


@torch.no_grad()
def test_the_bits_are_those_of_the_call_itself(aside: AttentionAside) -> None:
    before = threads()
    for length in (2, 17, 100, 700):
        there = attend(length, is_causal=True)
        with torch._C.DisableTorchFunction():
            here = attend(length, is_causal=True)
        assert torch.equal(there, here)
    assert len(threads() - before) == 1
    assert aside.active


@torch.no_grad()
def test_a_thread_ends_after_some_lengths(aside: AttentionAside) -> None:
    before, seen = threads(), set()
    most = _attention_thread._MOST_KEPT // torch.get_num_threads()
    for length in range(2, 2 + 2 * most + 1):
        attend(length)
        assert len(threads() - before) == 1
        seen |= threads() - before
    assert len(seen) == 3
    for _ in range(3):  # one that was met needs no other
        attend(2 + 2 * most)
    assert seen >= threads() - before
    aside.close()
    for thread in seen:
        thread.join(10)
    assert threads() <= before


def test_what_keeps_nothing_stays_where_it_is(aside: AttentionAside) -> None:
    """One token, other types, what autograd records; and where somebody looks on."""
    before = threads()

    class Operations(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]
            self.seen = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.seen += "attention" in func.__name__
            return func(*args, **(kwargs or {}))

    class Counter(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    attend(9)  # with autograd
    with torch.no_grad():
        attend(1)
        attend(9, torch.float32)
        with Operations() as operations:
            attend(9)
        assert operations.seen == 1
        aside.discard()
        with Counter():
            aside.begin()
            attend(9)
            aside.discard()
        aside.begin()
    assert threads() <= before
    assert aside.active


def test_the_state_of_the_thread_goes_along(aside: AttentionAside) -> None:
    before = threads()
    with torch.inference_mode():
        assert attend(9).is_inference()
    with torch.no_grad():
        made = attend(9)
        assert not made.is_inference()
        assert not made.requires_grad
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert attend(9, torch.float32).dtype is torch.bfloat16
    assert len(threads() - before) == 1


@torch.no_grad()
def test_an_error_comes_back(aside: AttentionAside) -> None:
    query, key, value = tensors(9)
    with pytest.raises(RuntimeError):
        functional.scaled_dot_product_attention(query, key[..., :3], value)
    assert aside.active
    assert attend(9).shape == query.shape


@torch.no_grad()
def test_another_number_of_threads_has_another_thread(aside: AttentionAside) -> None:
    number, before = torch.get_num_threads(), threads()
    attend(9)
    first = threads() - before
    try:
        torch.set_num_threads(number + 1)
        attend(9)
        assert len(threads() - before) == 1
        assert aside._place._thread is not None
        assert aside._place._thread.submit(torch.get_num_threads).result() == number + 1
    finally:
        torch.set_num_threads(number)
    assert first


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@torch.no_grad()
def test_a_forked_child_has_a_thread_of_its_own(aside: AttentionAside) -> None:
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        attend(9)
        if (child := os.fork()) == 0:
            try:
                os._exit(0 if attend(9).shape[2] == 9 else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        torch.set_num_threads(number)
    assert aside.active
