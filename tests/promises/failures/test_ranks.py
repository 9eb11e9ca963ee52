"""What several ranks do when one of them dies, hangs, fails or does something else."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch

import pipeload
from pipeload.engine.row_products import RowProducts
from pipeload.entry import ranks as ranks_file
from pipeload.ring import group as group_file
from pipeload.ring import head_rows
from pipeload.weights.placement import SCRATCH_BYTES
from tests.support.exact import load, prompt, smallest_limit, steady_floor
from tests.support.models import load_plain, save_random, tiny_config
from tests.support.ranks import Ranks, free_port, on_ranks
from tests.support.sweeps import few

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import TinyCheckpoint

__all__ = ["steady_floor"]  # a fixture: every test here runs with it

pytestmark = pytest.mark.slow
HOST = socket.gethostname()


def _answer(model: Any, tokens: int = 6) -> list[int]:
    ids = model.generate(prompt(), max_new_tokens=tokens, do_sample=False, eos_token_id=None)
    found: list[int] = ids[0].tolist()
    return found


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(ids).logits
    return logits


def _until_it_fails(model: Any) -> str:
    try:
        while True:
            _answer(model, 40)
    except pipeload.GroupError as error:
        return f"{error.rank} {error.host}: {error}"


def _wait_for(*files: Path) -> None:
    while not all(file.exists() for file in files):
        time.sleep(0.01)


@pytest.mark.parametrize("killed", few([0, 1, 2], [0, 2]))
def test_a_rank_is_killed(tiny: TinyCheckpoint, tmp_path: Path, killed: int) -> None:
    """All others name it and its machine, and answer again as a group of those that are left."""
    folder = tiny("llama")
    limit, port = smallest_limit(folder), str(free_port())

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        (tmp_path / str(rank)).touch()
        said = _until_it_fails(model)
        with pytest.raises(pipeload.GroupError, match="the group of 3 ranks is broken: rank"):
            _answer(model)
        model.pipeload.remove()
        left = [n for n in range(3) if n != killed]
        os.environ |= {"RANK": str(left.index(rank)), "WORLD_SIZE": "2", "MASTER_PORT": port}
        again = load(folder, limit, ranks=2)
        answer = _answer(again)
        again.pipeload.remove()
        names = {thread.name for thread in threading.enumerate()}
        return said, answer, sorted(name for name in names if name.startswith("pipeload"))

    ranks = Ranks(3, act, seconds=90)
    _wait_for(*(tmp_path / str(rank) for rank in range(3)))
    os.kill(ranks.pids[killed], signal.SIGKILL)
    found = ranks.results()
    assert found.pop(killed) == signal.SIGKILL
    for said, answer, threads in found:
        assert said.startswith(f"{killed} {HOST}: rank {killed} ({HOST}) of 3 is lost")
        assert answer == _answer(load_plain(folder))
        assert threads == []


def test_a_rank_hangs(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """One that is stopped is lost once it has been silent for the patience."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        (tmp_path / str(rank)).touch()
        return _until_it_fails(model)

    ranks = Ranks(2, act, seconds=60)
    _wait_for(*(tmp_path / str(rank) for rank in range(2)))
    os.kill(ranks.pids[1], signal.SIGSTOP)
    try:
        said = ranks.result(0)
    finally:
        os.kill(ranks.pids[1], signal.SIGKILL)
        os.kill(ranks.pids[1], signal.SIGCONT)
    assert said.startswith(f"1 {HOST}: ")
    assert "has been silent for" in said
    assert ranks.result(1) == signal.SIGKILL


def test_a_rank_is_interrupted(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """Ctrl-C ends it at once, and the others know who it was."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        (tmp_path / str(rank)).touch()
        return _until_it_fails(model)

    ranks = Ranks(2, act, seconds=60)
    _wait_for(*(tmp_path / str(rank) for rank in range(2)))
    os.kill(ranks.pids[1], signal.SIGINT)
    first, other = ranks.results()
    assert other.startswith("KeyboardInterrupt")
    assert first.startswith(f"1 {HOST}: ")


def test_a_block_fails_and_the_group_goes_on(tiny: TinyCheckpoint) -> None:
    """Its rank raises what it met, the others that it did; then all of them answer again."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        block = model.model.layers[next(n for n in range(6) if _is_here(model, n))]

        def fail(*_: object) -> None:
            raise OSError("the cable is loose")

        hook = block.register_forward_pre_hook(fail) if rank == 1 else None
        with pytest.raises((pipeload.GroupError, OSError)) as caught:
            _answer(model)
        if hook is not None:
            hook.remove()
        return str(caught.value), _answer(model)

    (said, first), (own, other) = on_ranks(2, act, seconds=60)
    assert own == "the cable is loose"
    assert f"rank 1 ({HOST}) failed in 'model.layers." in said
    assert "OSError: the cable is loose." in said
    assert first == other == _answer(load_plain(folder))


def test_rows_of_the_head_fail_and_the_group_goes_on(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before or while they are computed. A weight of the user's own is everybody's, as a whole.

    A new forward is refused: it may need all rows.
    """
    folder = tiny("llama")
    limit = smallest_limit(folder)
    monkeypatch.setattr(head_rows, "can_cut_rows", lambda _cut: True)

    def act(rank: int) -> Any:
        model, said = load(folder, limit, ranks="auto"), []
        head = model.lm_head
        assert any(unit.name.startswith("lm_head[") for unit in model.pipeload.plan.units)

        def fail(*_: object) -> None:
            raise OSError("the disk is gone")

        for way in ("before", "within"):
            hook = head.register_forward_pre_hook(fail) if (rank, way) == (1, "before") else None
            within = mock.patch.object(RowProducts, "by_whole", fail)
            with (
                within if (rank, way) == (1, "within") else contextlib.nullcontext(),
                pytest.raises((pipeload.GroupError, OSError)) as caught,
            ):
                _answer(model)
            if hook is not None:
                hook.remove()
            said.append(str(caught.value))
        answers = [_answer(model)]
        head.forward = lambda x: torch.nn.functional.linear(x, head.weight)
        with pytest.raises(pipeload.UnsupportedOperationError, match="'lm_head' was replaced"):
            _answer(model)
        del head.forward
        answers.append(_answer(model))
        head.weight = torch.nn.Parameter(torch.ones(head.weight.shape).cumsum(0))
        return said, [*answers, _answer(model)]

    (said, first), (own, other) = on_ranks(2, act, seconds=90)
    assert own == ["the disk is gone"] * 2
    assert all(f"rank 1 ({HOST}) failed in 'lm_head': OSError: the disk" in text for text in said)
    plain = load_plain(folder)
    wanted = [_answer(plain)] * 2
    plain.lm_head.weight = torch.nn.Parameter(torch.ones(plain.lm_head.weight.shape).cumsum(0))
    assert first == other == [*wanted, _answer(plain)]


def test_a_head_of_the_users_own_fails(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its rows, so the group ends, and all are told what it was."""
    folder = tiny("llama")
    limit = smallest_limit(folder)
    monkeypatch.setattr(head_rows, "can_cut_rows", lambda _cut: True)

    def fail(*_: object) -> None:
        raise OSError("the disk is gone")

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        head = model.lm_head
        head.weight = torch.nn.Parameter(torch.ones(head.weight.shape).cumsum(0))
        answer = _answer(model)
        if rank == 1:
            head.register_forward_pre_hook(fail)
        with pytest.raises((pipeload.GroupError, OSError)) as caught:
            _answer(model)
        return str(caught.value), answer

    (said, first), (own, other) = on_ranks(2, act, seconds=60)
    assert own == "the disk is gone"
    assert f"rank 1 ({HOST})" in said
    assert "broke off: a pass ended by OSError: the disk is gone." in said
    assert first == other


def test_a_head_whose_rows_are_not_exact(
    tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one rank's, and the log says why."""
    folder = tiny("llama")
    limit = smallest_limit(folder)
    monkeypatch.setattr(head_rows, "can_cut_rows", lambda _cut: False)

    def act(_rank: int) -> Any:
        said: list[str] = []
        log = logging.getLogger("pipeload")
        log.setLevel(logging.INFO)
        with mock.patch.object(log, "info", lambda *words: said.append(str(words))):
            model = load(folder, limit, ranks="auto")
        heads = [unit.name for unit in model.pipeload.plan.units if unit.name.startswith("lm_head")]
        return bool(heads), _answer(model), any("its rows by themselves may" in s for s in said)

    found = on_ranks(2, act, seconds=60)
    assert sorted(found) == [
        [False, (wanted := _answer(load_plain(folder))), True],
        [True, wanted, True],
    ]


def _is_here(model: Any, layer: int) -> bool:
    return any(unit.name == f"model.layers.{layer}" for unit in model.pipeload.plan.units)


def test_a_pass_that_one_cannot_begin(tiny: TinyCheckpoint) -> None:
    """A rank with too little memory for a pass refuses it for all, and the group goes on."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit if rank else 4_000_000_000, ranks="auto")
        with pytest.raises((pipeload.GroupError, pipeload.MemoryLimitError)) as caught:
            _logits(model, torch.ones((200, 200), dtype=torch.long))
        return str(caught.value), _answer(model)

    found = on_ranks(2, act, seconds=60)
    assert all(isinstance(one, list) for one in found), found
    (said, first), (own, other) = found
    assert "could not begin the pass: PassMemoryLimitError" in said
    assert str(limit) in own
    assert first == other == _answer(load_plain(folder))


def test_another_prompt(tiny: TinyCheckpoint) -> None:
    """A rank that computes something else is named by all."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        with pytest.raises(pipeload.GroupError) as caught:
            _logits(model, prompt(seed=11 + (rank == 2)))
        return str(caught.value), _answer(model)

    found = on_ranks(3, act, seconds=60)
    assert all(isinstance(one, list) for one in found), found
    for said, answer in found:
        assert said.startswith(f"rank 2 ({HOST}) computes other tokens than rank 0 ({HOST})")
        assert answer == _answer(load_plain(folder))


def test_attentions_are_refused(tiny: TinyCheckpoint) -> None:
    """On all ranks, in the same words; also by a configuration; the group goes on."""
    folder = tiny("llama")

    def act(_rank: int) -> Any:
        model = load(folder, 4_000_000_000, ranks="auto", attn_implementation="eager")
        said = []
        for inner in (False, True):
            model.config.output_attentions = inner
            with pytest.raises(pipeload.UnsupportedOperationError) as caught:
                model(prompt(), **({} if inner else {"output_attentions": True}))
            said.append(str(caught.value))
        model.config.output_attentions = False
        return said, _answer(model)

    first, other = on_ranks(2, act, seconds=60)
    said, answer = first
    assert first == other
    assert said[0] == said[1]
    assert said[0].startswith("output_attentions is recorded inside of blocks")
    assert answer == _answer(load_plain(folder, attn_implementation="eager"))


def test_another_mask(tiny: TinyCheckpoint) -> None:
    """It is compared, too."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model, ids = load(folder, limit, ranks="auto"), prompt(2)
        mask = torch.ones_like(ids)
        mask[1, 0] = rank
        with torch.no_grad(), pytest.raises(pipeload.GroupError) as no:
            model(ids, attention_mask=mask)
        return str(no.value)

    for said in on_ranks(2, act, seconds=60):
        assert said.startswith(f"rank 1 ({HOST}) computes other tokens than rank 0 ({HOST})")


def test_random_numbers_are_rank_0s(tiny: TinyCheckpoint) -> None:
    """Whoever has another seed draws the same tokens all the same."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        torch.manual_seed(rank)
        return model.generate(prompt(), max_new_tokens=8, do_sample=True)[0].tolist()

    first, other = on_ranks(2, act, seconds=60)
    torch.manual_seed(0)
    plain = load_plain(folder).generate(prompt(), max_new_tokens=8, do_sample=True)
    assert first == other == plain[0].tolist()


def test_a_rank_leaves(tiny: TinyCheckpoint) -> None:
    """One whose script ends is missed by those that go on."""
    folder = tiny("llama")
    limit = smallest_limit(folder)

    def act(rank: int) -> Any:
        model = load(folder, limit, ranks="auto")
        answer = _answer(model)
        if rank:
            model.pipeload.remove()
            return answer
        return _until_it_fails(model)

    said, _answer_there = on_ranks(2, act, seconds=60)
    assert said.startswith(f"1 {HOST}: ")


def test_a_plain_model_that_does_not_fit(tmp_path: Path) -> None:
    """Weights of all ranks are cast: those of the others may be too much here.

    Once the model is dropped, this rank has left the group, and loads it again.
    """
    folder = save_random(tiny_config("llama"), tmp_path, "bf16", seed=3)

    def act(rank: int) -> Any:
        model = load(folder, 4_000_000_000, ranks="auto", dtype=torch.float32)
        wanted = _answer(model)
        said = _until_it_fails(model) if rank == 0 else ""
        limit = model.pipeload.plan.memory_limit
        with (
            mock.patch("pipeload.engine.restore.rss_bytes", return_value=limit),
            pytest.raises(
                pipeload.MemoryLimitError, match=r"Delete the model \(`del model`\)"
            ) as no,
        ):
            model.pipeload.remove()
        more = no.value.smallest_limit - limit
        del model, no
        gc.collect()
        names = {thread.name for thread in threading.enumerate()}
        left = sorted(name for name in names if name.startswith("pipeload"))
        again = load(folder, 4_000_000_000, dtype=torch.float32)
        return said, more, left, _answer(again) == wanted

    (said, *first), (_, *other) = on_ranks(2, act, seconds=60)
    assert said.startswith(f"1 {HOST}: ")
    assert "or `del model` where that is refused, and load" in said
    for more, left, same in (first, other):
        assert more > SCRATCH_BYTES
        assert left == []
        assert same


def test_other_files(tiny: TinyCheckpoint, tmp_path: Path) -> None:
    """A rank with another finetune of the same shapes is refused by tensor and rank."""
    folders = [tiny("llama"), save_random("llama", tmp_path / "other", "fp32", seed=99)]

    def act(rank: int) -> Any:
        load(folders[rank], 4_000_000_000, ranks="auto")

    for said in on_ranks(2, act, seconds=60):
        assert said.startswith(f"GroupError: rank 1 ({HOST}) has not the same model as rank 0")
        assert "the tensor 'lm_head.weight'" in said or "the tensor 'model." in said


def test_another_number_of_threads(tiny: TinyCheckpoint) -> None:
    """Other bits are refused, or taken when asked for."""
    folder = tiny("llama")

    def act(rank: int) -> Any:
        with mock.patch.object(torch, "get_num_threads", return_value=1 + rank):
            with pytest.raises(pipeload.GroupError, match="threads of torch is 2, there 1") as no:
                load(folder, 4_000_000_000, ranks="auto")
            return str(no.value), len(_answer(load(folder, 4_000_000_000, ranks="mixed")))

    for said, count in on_ranks(2, act, seconds=60):
        assert f"rank 1 ({HOST}) computes otherwise" in said
        assert count == prompt().shape[1] + 6


def test_no_compiler_on_one(tiny: TinyCheckpoint) -> None:
    """It would compute by other kernels than the others."""
    folder = tiny("llama")

    def act(rank: int) -> Any:
        with mock.patch.object(ranks_file, "compiler", return_value=None if rank else "cc"):
            load(folder, 4_000_000_000, ranks="auto")

    for said in on_ranks(2, act, seconds=60):
        assert "C compiler is 'none', there 'found'" in said


def test_one_cannot_load(tiny: TinyCheckpoint) -> None:
    """The others are told why; nothing is left behind on any of them."""
    folder = tiny("llama")

    def act(rank: int) -> Any:
        load(folder, 1 if rank else 4_000_000_000, ranks="auto")

    first, other = on_ranks(2, act, seconds=60)
    assert other.startswith("MemoryLimitError")
    assert first.startswith(f"GroupError: rank 1 ({HOST}) could not go on while it is loaded: Mem")


def test_a_rank_never_comes(tiny: TinyCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others say which one it was; so does one that finds nobody."""
    folder = tiny("llama")

    def act(rank: int) -> Any:
        # Whoever gives up first is missing, too, for those that look later.
        monkeypatch.setattr(group_file, "JOIN_SECONDS", 12.0 + 12 * rank)
        if rank == 2:
            return None
        load(folder, 4_000_000_000, ranks="auto")

    first, other, _ = on_ranks(3, act, seconds=60)
    assert "rank 0 of 3 has waited for rank 2 in vain" in first
    assert other.startswith("GroupError: rank 1 of 3")

    monkeypatch.setattr(group_file, "JOIN_SECONDS", 4.0)

    def alone(_rank: int) -> Any:
        os.environ["RANK"] = "1"
        load(folder, 4_000_000_000, ranks="auto")

    (said,) = on_ranks(1, lambda rank: _with_world(alone, rank), seconds=60)
    assert "rank 1 of 2 cannot reach rank 0 at 127.0.0.1:" in said


def _with_world(act: Any, rank: int) -> Any:
    os.environ["WORLD_SIZE"] = "2"
    return act(rank)


def test_too_few_blocks(tmp_path: Path) -> None:
    """Nobody goes without."""
    folder = save_random(tiny_config("llama", num_hidden_layers=1), tmp_path, "fp32", seed=8)

    def act(_rank: int) -> Any:
        load(folder, 4_000_000_000, ranks="auto")

    for said in on_ranks(2, act, seconds=60):
        assert "1 block of the model for 2 ranks: some would have none. Run 1 rank at most." in said
