"""What a streaming model takes, it gives back: threads, descriptors, memory, hooks."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from transformers import MixtralConfig, MixtralForCausalLM

import pipeload
from pipeload import UnsupportedOperationError
from pipeload.engine.expert_computing import ExpertLayer
from pipeload.hf.recipes import Recipe
from pipeload.prefetch.dispatcher import Dispatcher
from pipeload_hooks import discard_ended
from tests.support.children import in_fork
from tests.support.experts import experts_of, save_moe
from tests.support.models import load_plain
from tests.support.streaming import (
    WAIT_SECONDS,
    assert_nothing_held,
    finish_messages,
    generated,
    load_streamed,
    logits,
    our_threads,
    prefetcher_of,
    wait_for_threads,
)
from tests.support.sweeps import few
from tests.support.warm import warm_python

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.conftest import TinyCheckpoint

SPARES = [0, 700_000, 10_000_000]


@pytest.fixture(scope="module")
def folder(tiny: TinyCheckpoint) -> Path:
    return tiny("llama")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def threads_of(model: Any) -> list[threading.Thread]:
    prefetcher = prefetcher_of(model)
    pool = prefetcher._dispatcher._reads._pool
    return [prefetcher._thread, *(pool._threads if pool is not None else ())]


def break_off(model: Any) -> None:
    """A pass that dies in the middle."""

    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[3].mlp.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        logits(model)
    hook.remove()


USES: dict[str, Callable[[Any], object]] = {
    "never used": lambda _model: None,
    "used": generated,
    "broken off": break_off,
    "removed": lambda model: model.pipeload.remove(),
}


@pytest.mark.parametrize("spare", SPARES)
@pytest.mark.parametrize("use", USES)
def test_a_forgotten_model_leaves_nothing(folder: Path, use: str, spare: int) -> None:
    """No thread, no descriptor, no arena; nobody has to call remove()."""
    gc.collect()
    before = descriptors()
    model = load_streamed(folder, spare=spare)
    USES[use](model)
    prefetcher = prefetcher_of(model) if use != "removed" else None
    threads = threads_of(model) if prefetcher is not None else []
    kept = [weakref.ref(model), *map(weakref.ref, model.model.layers)]
    if prefetcher is not None:
        kept += [weakref.ref(prefetcher), weakref.ref(prefetcher._dispatcher)]
        maps = [region.arena._map for region in prefetcher._dispatcher._slots.regions]
        kept += map(weakref.ref, {id(memory): memory for memory in maps}.values())
        del maps
    del model, prefetcher
    gc.collect()
    for thread in threads:
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
    threads.clear()
    gc.collect()
    assert [reference() for reference in kept if reference() is not None] == []
    discard_ended()
    assert _get_current_function_mode_stack() == []
    assert descriptors() <= before  # fewer: a model of an earlier test has gone meanwhile


@pytest.mark.parametrize("spare", SPARES)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_del_is_enough(tiny: TinyCheckpoint, tmp_path: Path, kind: str, spare: int) -> None:
    """The memory comes back at `del`, with no garbage collection: nothing is in a cycle."""
    model = load_streamed(tiny(kind) if kind == "llama" else save_moe(tmp_path), spare=spare)
    generated(model)
    threads = threads_of(model)
    arenas: list[weakref.ref[Any]] = [weakref.ref(prefetcher_of(model)._dispatcher)]
    arenas += map(weakref.ref, model.parameters())  # where all fits, they hold the file's mapping
    arenas += [weakref.ref(seat.memory) for seat in experts_of(model).seats]
    gc.collect()
    gc.disable()
    try:
        del model
        assert [thread for thread in threads if thread.is_alive()] == []
        assert not any(reference() is not None for reference in arenas)
    finally:
        gc.enable()


def test_a_pass_that_died_among_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What watches torch's functions for it ends with the model, and holds none of its memory."""

    def die(*_args: object) -> None:
        raise KeyboardInterrupt

    def interrupted(model: Any) -> None:  # apart: an exception holds its frames
        with monkeypatch.context() as patch:
            patch.setattr(ExpertLayer, "need", die)
            with pytest.raises(KeyboardInterrupt):
                logits(model)

    discard_ended()
    before = _get_current_function_mode_stack()
    model = load_streamed(save_moe(tmp_path))
    interrupted(model)
    assert _get_current_function_mode_stack() != before
    parameters = [weakref.ref(parameter) for parameter in model.parameters()]
    del model
    gc.collect()
    assert _get_current_function_mode_stack() == before
    assert [reference() for reference in parameters if reference() is not None] == []


def test_dropped_while_a_weight_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes at once, in the thread that drops it: a reader cannot wait for its own end."""
    config = MixtralConfig(
        hidden_size=96, intermediate_size=176, vocab_size=512, num_attention_heads=6,
        num_key_value_heads=3, num_hidden_layers=6, num_local_experts=4,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path)  # experts in tensors of their own
    model = load_streamed(tmp_path)
    converting, go_on = threading.Event(), threading.Event()
    late: list[object] = []
    fill = Recipe.fill

    def slowly(*args: Any, **kwargs: Any) -> None:
        if late:
            converting.set()
            go_on.wait(WAIT_SECONDS)
        fill(*args, **kwargs)

    monkeypatch.setattr(Recipe, "fill", slowly)
    hook = model.model.layers[-1].register_forward_hook(lambda *_args: late.append(1))
    logits(model)  # after it, the next pass's first blocks are read
    hook.remove()
    assert converting.wait(WAIT_SECONDS)
    ended: list[threading.Thread] = []
    weakref.finalize(model, lambda: ended.append(threading.current_thread()))
    threads = threads_of(model)
    gc.collect()  # what made the model for this test is in cycles
    threading.Timer(0.2, go_on.set).start()
    del model, hook
    assert ended == [threading.current_thread()]
    assert not any(thread.is_alive() for thread in threads)


def test_a_dropped_model_in_a_cycle_does_not_set_the_limit(folder: Path) -> None:
    """As a pipeline or a trainer may hold it: the next one is loaded with a limit of its own.

    Nor does it keep its weights, in whose place the next one's come.
    """
    holder: list[Any] = [load_streamed(folder, spare=0)]
    weights = [weakref.ref(parameter) for parameter in holder[0].parameters()]
    holder.append(holder)
    gc.disable()
    try:
        del holder
        other = pipeload.from_pretrained(folder, memory_limit="50GB")
        assert not any(reference() is not None for reference in weights)
        other.pipeload.remove()
    finally:
        gc.enable()


@pytest.mark.parametrize("spare", few(SPARES, [SPARES[0], SPARES[-1]]))
def test_thirty_loads_and_removes(folder: Path, spare: int) -> None:
    """No thread is left, and descriptors are as many after thirty as after one."""
    gc.collect()
    before, counts = our_threads(), set()
    for _ in range(30):
        model = load_streamed(folder, spare=spare)
        with model.pipeload:
            logits(model)
        wait_for_threads(before)
        counts.add(descriptors())
    assert len(counts) == 1


def test_nothing_is_written_to_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into the checkpoint, nor where temporary files go."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def contents() -> list[tuple[str, int, int]]:
        files = [*folder.rglob("*"), *tmp_path.rglob("*")]
        return sorted((str(f), f.stat().st_blocks, f.stat().st_mtime_ns) for f in files)

    before = contents()
    for spare in SPARES:
        model = load_streamed(folder, spare=spare)
        generated(model)
        model.pipeload.remove()
        generated(model)
    assert contents() == before


def test_a_model_that_fits_is_left_alone(folder: Path) -> None:
    """After its first pass no block carries a hook, the model carries one, and no thread runs."""
    plain = load_plain(folder)
    before = our_threads()  # those of an earlier test may still end
    model = load_streamed(folder, spare=10_000_000)
    assert hooks_of(model.model.layers) > 0
    for number in range(1, 4):
        assert torch.equal(logits(model), logits(plain))
        # What a call past the model's own hooks comes by first.
        assert hooks_of(model.model) == hooks_of(model.model.layers[0]) + 1 == 2
        assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == (1, 0)
        wait_for_threads(before)
        assert model.pipeload.stats().passes == number
    assert generated(model) == generated(plain)
    assert_nothing_held(model)
    model.pipeload.remove()
    assert hooks_of(model) == 0
    assert torch.equal(logits(model), logits(plain))


def hooks_of(root: torch.nn.Module) -> int:
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in root.modules())


def test_a_block_costs_two_hooks_and_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many weights it has; nothing is opened, collected or trimmed in a pass."""
    model = load_streamed(folder)
    logits(model)
    assert hooks_of(model.model.layers) == 2 * 6
    prefetcher = prefetcher_of(model)
    calls: list[str] = []

    def count(name: str, original: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return original(*args, **kwargs)

        return counted

    for name in ("entered", "ran", "wanted", "released", "reset"):
        monkeypatch.setattr(Dispatcher, name, count(name, getattr(Dispatcher, name)))
    for owner, name in ((os, "open"), (gc, "collect"), (os, "fstat")):
        monkeypatch.setattr(owner, name, count(name, getattr(owner, name)))
    for _ in range(3):
        calls.clear()
        logits(model)
        finish_messages(prefetcher)
        assert calls.count("ran") + calls.count("wanted") == 7  # six blocks and the head
        assert calls.count("entered") + calls.count("wanted") == calls.count("released")
        assert {"reset", "open", "collect"}.isdisjoint(calls)
        files = len(model.pipeload._session.files._files)
        assert calls.count("fstat") == files


def test_views_are_made_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third pass on, binding is assignment alone."""
    model = load_streamed(folder)
    for _ in range(3):
        logits(model)

    def refuse(*_args: object, **_kwargs: object) -> None:
        raise AssertionError("a view was made again")

    monkeypatch.setattr("pipeload.weights.placement.Placement.__init__", refuse)
    monkeypatch.setattr("pipeload.weights.arena.Arena.tensor", refuse)
    logits(model)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(folder: Path) -> None:
    """It gets a clear error instead of a hang; the parent goes on."""
    plain = load_plain(folder)
    model = load_streamed(folder)
    torch.set_num_threads(1)
    expected = logits(plain)
    for action in (lambda: logits(model), model.pipeload.remove):
        message = in_fork(action)
        assert message.startswith(UnsupportedOperationError.__name__), message
        assert "forked" in message
        assert "'spawn'" in message
        assert torch.equal(logits(model), expected)
    assert_nothing_held(model)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_of_a_model_that_fits(folder: Path) -> None:
    """It needs no thread any more, so it works in the child as well."""
    model = load_streamed(folder, spare=10_000_000)
    torch.set_num_threads(1)
    expected = logits(model)

    def check() -> None:
        assert torch.equal(logits(model), expected)

    assert in_fork(check) == ""


SCRIPT = """
import sys
from pathlib import Path
from tests.support.streaming import load_streamed, logits, generated
model = load_streamed(Path(sys.argv[1]), spare=int(sys.argv[2]))
generated(model)
print("done", flush=True)
if sys.argv[3] == "error":
    raise SystemExit(3)
if sys.argv[3] == "cycle":
    model.myself = [model]
"""


@pytest.mark.parametrize(
    ("spare", "how", "status"),
    few([(0, "error", 3), (0, "cycle", 0), (10_000_000, "cycle", 0)], [(0, "cycle", 0)]),
)
def test_the_interpreter_ends(folder: Path, spare: int, how: str, status: int) -> None:
    """With a live model, at once, without a word on stderr."""
    done = subprocess.run(
        [*warm_python(), "-c", SCRIPT, str(folder), str(spare), how],
        cwd=Path(__file__).parents[3],
        env=os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"},
        capture_output=True,
        text=True,
        timeout=4 * WAIT_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout) == (status, "done\n"), done.stderr
    noise = [line for line in done.stderr.splitlines() if "Loading weights" not in line]
    assert noise == []
