"""How many tokens are guessed, and whether any are: from what passes took, without a clock."""

from __future__ import annotations

import pytest

from pipeload.entry.draft_control import MOST, DraftControl, Took, tokens_kept


def measured(
    kept_of: tuple[tuple[int, int], ...],
    *,
    seconds: float = 2.0,
    per_row: float = 0.0,
    per_guess: float = 0.05,
    alone: float = 1.0,
    right: float = 0.8,
) -> DraftControl:
    """A control that knows passes alone, and some with so many guesses of which so many held."""
    control = DraftControl(right=right, share_alone=alone / seconds)
    for _ in range(2):
        control.note_alone(alone, alone / 10)
    for kept, guessed in kept_of:
        took = seconds + per_row * (guessed + 1)
        control.note(Took(guessed, kept, took, guessed * per_guess))
    return control


def test_tokens_kept() -> None:
    """One of the pass itself, and guesses up to the first wrong one."""
    assert tokens_kept(0.0, 8) == 1
    assert tokens_kept(1.0, 8) == 9
    assert tokens_kept(0.5, 2) == 1 + 0.5 + 0.25


def test_more_are_guessed_where_passes_take_longer() -> None:
    """Disk time over computing time says how many."""
    counts = [
        measured(((3, 4),) * 6, seconds=seconds, alone=seconds / 2).count(99)
        for seconds in (0.05, 0.2, 2.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] <= MOST
    assert measured(((4, 4),) * 20).count(3) == 3  # no more than may still come
    assert measured(((4, 4),) * 20).count(-1) == 0


def test_good_guesses_pay() -> None:
    """Nine tokens for twice the time of one."""
    control = measured(((8, 8),) * 14)
    assert control.pays
    assert control.tokens_per_pass == 9
    assert control.count(99) == MOST


def test_wrong_guesses_do_not_pay() -> None:
    """Known after five of them; before that nothing is."""
    assert measured(((0, 4),) * 2).pays
    assert not measured(((0, 4),) * 6).pays


@pytest.mark.parametrize(("per_row", "pays"), [(0.0, True), (0.6, False)])
def test_rows_that_read_more(per_row: float, pays: bool) -> None:
    """Experts that only guesses are routed to count with the passes that read them."""
    taken = ((2, 4), (4, 6), (1, 2), (5, 8), (3, 3), (6, 8)) * 3
    control = measured(taken, per_row=per_row, right=0.8)
    assert control.pays == pays
    assert (control.count(99) > 4) == pays


def test_what_is_measured_counts_beside_the_formula() -> None:
    """Guesses that are right one by one, and take longer than they say, are seen after a while."""
    control = measured(((1, 1),) * 11, per_guess=0.1)
    assert control.pays
    control.note(Took(1, 1, 30.0, 0.1))
    assert not control.pays


@pytest.mark.parametrize(("latest", "wanted"), [(2.0, 1.0), (4.0, 2.0), (0.5, 0.5)])
def test_how_long_a_pass_would_take_alone(latest: float, wanted: float) -> None:
    """As it was measured; longer where the disk has become slower, and never over the pass now."""
    control = measured(())
    assert control.seconds_alone is None
    assert control.pays
    control.share_alone = 0.5
    for _ in range(3):
        control.note(Took(4, 4, latest, 0.1))
    assert control.seconds_alone == pytest.approx(wanted)


def test_what_a_draft_promises() -> None:
    """Passes that wait are worth one; passes that compute are not, nor one as large as they are."""
    waiting, computing = DraftControl(), DraftControl()
    for _ in range(2):
        assert not waiting.knows_alone
        waiting.note_alone(1.0, 0.1)
        computing.note_alone(1.0, 0.95)
    assert waiting.knows_alone
    assert waiting.promises(0.9, 0.4)
    assert not waiting.promises(9.0, 0.4)
    assert not computing.promises(0.9, 0.9)


def test_more_processor_time_than_a_pass_took() -> None:
    """Threads that compute at once: then nothing waits, which is no time won."""
    control = DraftControl()
    for _ in range(2):
        control.note_alone(0.1, 0.2)
    assert not control.promises(3.0, 0.9)


def test_lookups_are_tried_again() -> None:
    """Where nothing was found for long, or nothing was right, a few guesses cost little."""
    control = DraftControl(right=0.5)
    assert control.count(99) > 0
    for _ in range(30):
        control.note(Took(0, 0, 1.0, 0.0))
    assert control.count(99) > 0
    wrong = measured(((0, 2), (0, 4)) * 12, per_row=0.5, right=0.5)
    assert wrong.count(99) == 0
    for _ in range(8):
        wrong.note(Took(0, 0, 2.5, 0.0))
    assert wrong.count(99) > 0
    wrong.forget()
    assert wrong.tokens_per_pass == 0
