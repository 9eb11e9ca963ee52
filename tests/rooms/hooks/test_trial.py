"""Runs without weights: the memory of known chains of tensors, to the byte."""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pipeload_hooks import Repeated, TooLongError, _kernels, _trial, try_out

KB = 1 << 10


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_a_chain_of_tensors() -> None:
    """Two live at once, the first one goes; views cost nothing, and what was there before neither.

    The result is what is kept.
    """
    given = meta(KB)

    def chain() -> torch.Tensor:
        first = given + 1
        second = first.view(32, 32).t() * 2
        del first
        return second[:4].sum(0)

    trial = try_out(chain)
    assert trial.error is None
    assert trial.peak == 2 * KB * 4
    assert trial.kept == 32 * 4


def test_nothing_is_kept_of_a_trial() -> None:
    """Its tensors may live on, and go when they will."""
    trial = try_out(lambda: meta(8) + meta(8))
    assert trial.output.shape == (8,)
    del trial
    gc.collect()


def test_values_of_small_things_are_known() -> None:
    """Masks and positions are computed, and decide; weights are not."""
    weight, mask = meta(64, 64), torch.ones(2, 64, dtype=torch.bool)

    def run() -> torch.Tensor:
        positions = torch.arange(64, device=weight.device)
        rows = weight[positions] if mask.all() else weight[:1]
        size = int((positions[-1] + 1).item())
        picked = rows[mask[0] & (positions < 16)]
        return torch.cat([rows, picked]).expand(size, -1, -1).clone()

    trial = try_out(run)
    assert trial.error is None
    assert trial.output.shape == (64, 80, 64)


def test_questions_about_unknown_values_have_the_usual_answer() -> None:
    """All is finite, nothing is infinite; a mask without values hides nothing."""
    states = meta(4, 8)

    def run() -> torch.Tensor:
        assert states.isfinite().all()
        assert not states.isinf().any()
        return states[(states > 0)[:, 0]]

    assert try_out(run).output.shape == (4, 8)


def test_how_long_a_model_speaks_is_taken_from_its_words() -> None:
    """The longest of several, and which word each frame is of; else the trial ends there."""
    table, words = meta(16, 4), torch.zeros(2, 5, dtype=torch.long)

    def run() -> torch.Tensor:
        states = torch.nn.functional.embedding(words, table)
        lasting = states.sum(-1).exp().long()
        longest = torch.zeros(2, int(lasting.sum(1).max()), 4, device=table.device)
        for index, (one, last) in enumerate(zip(states, lasting, strict=True)):
            frames = torch.repeat_interleave(one, last, dim=0)
            longest[index, : len(frames)] = frames
        return longest

    assert try_out(run, frames=3).output.shape == (2, 15, 4)
    assert try_out(run).error is not None


def test_the_embedding_of_one_number() -> None:
    """Of a placeholder for pictures, say: it is no sequence."""
    table = meta(16, 4)
    one = torch.full((), 3)
    assert try_out(lambda: torch.nn.functional.embedding(one, table)).output.shape == (4,)


def test_a_number_that_nobody_knows_ends_the_trial() -> None:
    """What was counted until then is told, with what was raised."""
    states = meta(KB)
    trial = try_out(lambda: range(int(((states + 1) * 2).max().item())))
    assert isinstance(trial.error, ValueError)
    assert trial.peak >= 2 * KB * 4


def test_random_numbers_are_not_used_up() -> None:
    """A trial leaves the generator where it was."""
    before = torch.random.get_rng_state()
    try_out(lambda: torch.rand(4) + torch.randn(4))
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_linear_takes_its_result(mode: Any) -> None:
    """In whatever mode it is asked."""
    linear = nn.Linear(64, 256, device="meta")
    with mode():
        trial = try_out(lambda: linear(meta(2, 16, 64)))
    assert trial.kept == 2 * 16 * 256 * 4
    assert trial.peak == trial.kept + 2 * 16 * 64 * 4


def test_attention_is_one_kernel_where_a_cpu_has_one() -> None:
    """Scores are written out for heads of another width, and never for the usual ones."""
    query, wide = meta(1, 4, 512, 32), meta(1, 4, 512, 48)
    scores = 4 * 512 * 512 * 4
    attend = nn.functional.scaled_dot_product_attention
    assert try_out(lambda: attend(query, query, query)).peak < scores / 4
    assert try_out(lambda: attend(query, query, wide)).peak > 2 * scores
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool)
    fused = try_out(lambda: attend(query, query, query, mask)).peak
    assert scores / 4 <= fused < scores / 2


def test_a_convolution_rearranges() -> None:
    """Input and result once more, colours as they lie."""
    picture, states = meta(1, 3, 64, 64), meta(1, 32, 64, 64)
    first, then = nn.Conv2d(3, 32, 3, device="meta"), nn.Conv2d(32, 32, 1, device="meta")
    made = 32 * 62 * 62 * 4
    assert 2 * made <= try_out(lambda: first(picture)).peak < 2.1 * made
    whole = 32 * 64 * 64 * 4
    trial = try_out(lambda: (then(states), then(states), then(states[:, :, :9])))
    assert trial.kernels == 2
    assert 2 * whole <= try_out(lambda: then(states)).peak < 2.1 * whole


class Stack(nn.Module):
    """Blocks, whose results may all be kept."""

    def __init__(self, count: int, *, kept: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64, device="meta") for _ in range(count))
        self.kept = kept

    def forward(self, states: torch.Tensor) -> Any:
        found = [states]
        for layer in self.layers:
            states = layer(states)
            found.append(states)
            found = found if self.kept else found[-1:]
        return found


@pytest.mark.parametrize("kept", [False, True])
def test_few_blocks_stand_for_all(*, kept: bool) -> None:
    """What each leaves behind is counted for those that are not there."""
    every, few = Stack(12, kept=kept), Stack(3, kept=kept)
    whole = try_out(lambda: every(meta(100, 64)))
    short = try_out(lambda: few(meta(100, 64)), [Repeated(list(few.layers), [0, 0, 9])])
    assert (short.peak, short.kept) == (whole.peak, whole.kept)
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in few.layers)


class Mixed(nn.Module):
    """Blocks of two kinds, of which one leaves a state behind, and the other takes much."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Linear(64, 64 if kind == "a" else 4096, device="meta") for kind in kinds
        )
        self.kept: list[torch.Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(self.shorten)

    def shorten(self, layer: nn.Module, _: Any, output: torch.Tensor) -> torch.Tensor:
        """The block's result is as large as what it gets, whatever it is."""
        if output.shape[1] == 64:
            self.kept.append(output)
        return output[:, :64] + 1

    def forward(self, states: torch.Tensor) -> Any:
        for layer in self.layers:
            states = layer(states)
        return states, self.kept


@pytest.mark.parametrize("kinds", ["abababababab", "aabaaaaaabba", "aababbbbbbbb"])
def test_few_blocks_of_several_kinds_stand_for_all(kinds: str) -> None:
    """Each for those like it."""
    every, few = Mixed(kinds), Mixed(kinds[:4])
    whole = try_out(lambda: every(meta(100, 64)))
    last = {kind: kinds[:4].rindex(kind) for kind in "ab"}
    missing = [0] * 4
    for kind in kinds[4:]:
        missing[last[kind]] += 1
    short = try_out(lambda: few(meta(100, 64)), [Repeated(list(few.layers), missing)])
    assert short.kept == whole.kept
    states = 100 * 64 * 4  # of a block less: which of them is the last, is not known
    assert whole.peak <= short.peak <= whole.peak + states


def test_a_mask_that_is_shown_many_times_is_known() -> None:
    """Where it goes to what has no values, too; it picks as many as it does on a CPU."""
    words = torch.zeros(80, 96, dtype=torch.long)
    words[:, :4] = 1
    states = meta(80, 96, 64)

    def picked() -> torch.Tensor:
        mask = (words == 1).unsqueeze(-1).expand_as(states).to(states.device)
        return states[mask]

    trial = try_out(picked)
    assert trial.error is None
    assert trial.output.shape == (80 * 4 * 64,)
    assert trial.peak < 2 * words.nbytes + 4 * trial.output.nbytes + 3 * 8 * len(trial.output)


def test_pooling_gathers_what_does_not_lie_together() -> None:
    """Channels that come last, of a part of wider rows."""
    wide, pool = meta(2, 8, 8, 96), nn.MaxPool2d(2)
    whole, part = wide.permute(0, 3, 1, 2), wide[..., :32].permute(0, 3, 1, 2)
    made = 2 * 4 * 4 * (4 + 8)  # of a channel: values, and where they were
    assert try_out(lambda: pool(whole)).peak == 96 * made
    assert try_out(lambda: pool(part)).peak == 32 * made + part.nbytes


def test_few_channels_each_by_itself_are_padded() -> None:
    """To a register's width, both what goes in and what comes out."""
    given, layer = meta(2, 4, 96, 16), nn.Conv2d(4, 4, 3, padding=1, groups=4, device="meta")
    padded = _kernels._block() // 4
    assert layer.bias is not None
    expected = given.nbytes + layer.weight.nbytes + 2 * padded * given.nbytes
    assert try_out(lambda: layer(given)).peak == expected


def test_experts_in_one_product() -> None:
    """Torch knows its sizes in bf16 alone."""
    rows, weights, ends = meta(12, 16), meta(4, 16, 24), torch.tensor([3, 6, 9, 12]).int()
    trial = try_out(lambda: torch._grouped_mm(rows, weights, offs=ends))
    assert trial.output.shape == (12, 24)


@pytest.mark.parametrize(("choices", "most"), [(2, 500), (8, 4000)])
def test_an_expert_gets_each_word_once(choices: int, most: int) -> None:
    """But where a word has as many choices as there are experts, which may be the same ones."""
    chosen = meta(500, choices, dtype=torch.long)

    def run() -> Any:
        of_all = nn.functional.one_hot(chosen, num_classes=8).permute(2, 1, 0)
        return torch.where(of_all[3])

    choice, word = try_out(run).output
    assert len(choice) == len(word) == most


def test_a_tensor_that_is_made_of_one_that_is_there_is_that_one() -> None:
    """It is not copied, whether it has values or not; one of numbers is known."""
    known, unknown = torch.arange(4), meta(KB, KB)

    def run() -> tuple[Any, Any, Any]:
        numbers = torch.as_tensor([1, 2], device=unknown.device)
        return (
            torch.as_tensor(unknown, device=unknown.device),
            torch.as_tensor(known, device=unknown.device).sum().item(),
            (numbers.sum() + torch.tensor(data=[3], device=unknown.device)).item(),
        )

    trial = try_out(run)
    assert trial.output[0] is unknown
    assert trial.output[1:] == (6, 6)
    assert trial.peak < KB


def test_a_large_mask_of_one_number_is_known() -> None:
    """It is counted, but takes no memory; what is written to it is not known any more."""
    weight = meta(KB)

    def run(*, written: bool) -> torch.Tensor:
        mask = torch.ones(KB, KB, device=weight.device)
        if written:
            mask[:, 9:] = 0
        return weight.new_empty(int((mask[:, None].long() * 2)[0, 0].sum().item()))

    trial = try_out(lambda: run(written=False))
    assert trial.error is None
    assert trial.output.shape == (2 * KB,)
    assert 4 * KB * KB <= trial.peak < 33 * KB * KB
    assert isinstance(try_out(lambda: run(written=True)).error, ValueError)


def test_what_was_written_from_unknown_values_is_unknown() -> None:
    """Else no expert would ever be chosen; all are, and each has its number."""
    chosen, experts = meta(64, 1, dtype=torch.long), {str(n): n for n in range(8)}

    def run() -> list[int]:
        hits = torch.zeros(64, 8, dtype=torch.long).scatter_(1, chosen, 1)
        assert len(torch.where(hits.t()[3])[0]) == 64
        return [experts[f"{index[0]}"] for index in hits.sum(0).nonzero()]

    assert try_out(run).output == list(range(8))


def test_numbers_that_are_given_are_known() -> None:
    """Wherever they are wanted."""
    states = meta(4)
    trial = try_out(lambda: torch.tensor([[1, 2, 3]], device=states.device).tolist())
    assert trial.output == [[1, 2, 3]]


def test_what_is_found_in_a_picture_is_no_point_of_it() -> None:
    """One in every line; what is found in a row may be all of it."""
    scores = meta(48, 64)
    assert try_out((scores > 0).nonzero).output.shape == (64, 2)
    assert try_out((scores[0] > 0).nonzero).output.shape == (64, 1)


def test_recurrent_layers_run() -> None:
    """Their first state is small, and would be known."""
    layer = nn.LSTM(8, 8, 2, device="meta")
    assert try_out(lambda: layer(meta(16, 2, 8))[0]).output.shape == (16, 2, 8)


@pytest.mark.parametrize(("kernel", "orders"), [(1, 1), (3, 2)])
def test_weights_for_channels_that_come_last(kernel: int, orders: int) -> None:
    """They are put in order, twice where a kernel has more than one place; the next is alike."""
    first = nn.Conv2d(256, 256, kernel, padding="same", bias=False, device="meta")
    weights = first.weight.nbytes

    def run() -> torch.Tensor:
        return first(meta(1, 4, 4, 256).permute(0, 3, 1, 2))  # type: ignore[no-any-return]

    trial = try_out(run)
    small = 2 * trial.kept
    assert orders * weights <= trial.peak <= orders * weights + small
    assert trial.output.is_contiguous(memory_format=torch.channels_last)


def test_a_trial_has_an_end() -> None:
    """Some models look at thousands of pictures, one after the other."""

    def run() -> None:
        states = meta(8)
        while True:
            states = states + 1

    with mock.patch.object(_trial, "MOST_OPERATIONS", 99):
        trial = try_out(run)
    assert isinstance(trial.error, TooLongError)
    assert trial.peak == 2 * 8 * 4


def test_attention_is_written_out_where_a_model_asks_for_that() -> None:
    """Then its scores are there at once."""
    query = meta(1, 2, 64, 8)

    def attend() -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(query, query, query)

    def written_out() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return attend()

    scores = 2 * 64 * 64 * 4
    assert try_out(attend).peak < scores <= try_out(written_out).peak


def test_a_type_that_a_kernel_lacks_does_not_end_a_trial() -> None:
    """A model makes it another one where it finds itself on a CPU."""

    def count() -> torch.Tensor:
        found = torch.arange(8, dtype=torch.int32)
        return torch.histc(found, bins=4, min=0, max=7)

    trial = try_out(count)
    assert trial.error is None
    assert trial.output.shape == (4,)
