"""What a model holds on a card and in the host, and for how long: within its limits, after a pass
that died, where everything fits, once it is removed, once it is gone.
"""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import torch

from tests.gpu.card import IDS, REHEARSED
from tests.gpu.comparisons import SHAPE, assert_equal, generate, logits, stream_at

if TYPE_CHECKING:
    from pathlib import Path

    from tests.gpu.card import Card


def limits_hold(card: Card) -> None:
    """The allocator's peak stays under the device's limit, this process's under the host's."""
    from pipeload.system.memory import rss_bytes

    folder = card.checkpoint("bf16", SHAPE)
    for share in (0.0, 0.5):
        card.forget()
        model = _scarce(card, folder, share)
        most, ended = [0], threading.Event()

        def look(most: list[int] = most, ended: threading.Event = ended) -> None:
            while not ended.wait(0.005):
                most[0] = max(most[0], rss_bytes())

        watcher = threading.Thread(target=look)
        watcher.start()
        for _ in range(2):
            generate(model, max_new_tokens=40)
        ended.set()
        watcher.join()
        plan = model.pipeload.plan
        assert card.peak() <= plan.memory_limit, (card.peak(), plan.table())
        assert most[0] <= plan.host_memory_limit, (most[0], plan.table())
        if not REHEARSED:
            assert model.pipeload.stats().locked, "staging is not locked in its place"
        del model
    card.forget()


def _scarce(card: Card, folder: Path, share: float, **options: Any) -> Any:
    """At the smallest limit of the host that works."""
    import pipeload

    least, whole = card.limits(folder, **options)
    limit = least + int(share * (whole - least))
    for _ in range(3):  # the process grows a little between a plan and the next
        try:
            pipeload.plan(
                folder, memory_limit=limit, device=card.name, host_memory_limit=1, dtype="auto"
            )
        except pipeload.MemoryLimitError as error:
            host = error.smallest_limit + (8 << 20)
        try:
            return card.stream(folder, limit, host_memory_limit=host, **options)
        except pipeload.MemoryLimitError as error:
            print("   again:", error)
    raise AssertionError("no limit of the host works")


def another_limit(card: Card) -> None:
    """Smaller and larger while it is there; within each."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted = logits(plain, IDS)
    del plain
    least, whole = card.limits(folder)
    model = card.stream(folder, whole)
    for share in (1.0, 0.2, 0.6, 0.0, 1.0, 1.0):
        model.pipeload.set_memory_limit(least + int(share * (whole - least)))
        assert_equal(logits(model, IDS), wanted)
        card.forget()
        assert_equal(logits(model, IDS), wanted)
        assert card.peak() <= model.pipeload.plan.memory_limit, (
            share,
            card.peak(),
            card.reserved(),
            model.pipeload.plan.table(),
        )


def a_pass_that_died(card: Card) -> None:
    """By an interrupt, an error, and no memory on the card: the next one is right."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = logits(plain, IDS), generate(plain)
    del plain
    model = stream_at(card, folder, 0.3)
    errors: list[type[BaseException]] = [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError]
    for error in errors:

        def die(*_args: object, error: type[BaseException] = error) -> None:
            raise error("died")

        hook = model.model.layers[len(model.model.layers) // 2].mlp.register_forward_hook(die)
        try:
            logits(model, IDS)
        except error:
            pass
        else:
            raise AssertionError("it did not die")
        hook.remove()
        assert_equal(logits(model, IDS), wanted)
        assert generate(model) == tokens


def what_fits_has_no_hooks(card: Card) -> None:
    """After one pass nothing is read or copied, and no memory is locked."""
    folder = card.checkpoint("bf16", SHAPE)
    model = stream_at(card, folder, 1.1)
    logits(model, IDS)
    before = model.pipeload.stats()
    generate(model)
    after = model.pipeload.stats()
    assert (after.bytes_read, after.copied_bytes) == (before.bytes_read, before.copied_bytes)
    hooks = [h for m in model.modules() for h in (*m._forward_pre_hooks, *m._forward_hooks)]
    assert len(hooks) == 3, hooks  # where a pass may begin: both models, and the first block


def removal(card: Card) -> None:
    """The plain model, on the card."""
    folder = card.checkpoint("bf16", SHAPE)
    plain = card.plain(folder)
    wanted, tokens = logits(plain, IDS), generate(plain)
    del plain
    model = stream_at(card, folder, 0.8, tokens=2048)
    logits(model, IDS)
    model.pipeload.set_memory_limit("90%")
    model.pipeload.remove()
    assert_equal(logits(model, IDS), wanted)
    assert generate(model) == tokens


def nothing_is_left(card: Card) -> None:
    """Time and again a model: the card holds no more after the last than after the first."""
    folder = card.checkpoint("bf16", SHAPE)
    held = []
    for _ in range(3 if REHEARSED else 8):
        model = stream_at(card, folder, 0.4)
        generate(model, max_new_tokens=3)
        del model
        gc.collect()
        card.forget()
        held.append(card.reserved())
    assert held[-1] <= held[0] + (4 << 20), held
