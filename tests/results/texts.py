"""Sentences with figures of the files in examples/results/, for the pages."""

from __future__ import annotations

from tests.results.cells import seconds, size, times
from tests.results.frame import STORE, saved
from tests.results.part_slowdown import ENDS
from tests.results.part_theories import SLOW_DISK, WORTH


def _blog() -> str:
    """What another's figures would need."""
    told = saved("pi")
    if told is None:
        return "\n"
    blog = told["blog"]
    bound = (blog["weights"] - blog["room"]) / blog["rate"]
    claimed = 1 / blog["tokens_per_second"]
    return (
        f"\nA blog post on PIPELOAD gives {blog['tokens_per_second']} tokens/s for a Raspberry Pi "
        f"4 and a 7B model in 4 bits ({size(blog['weights'])}) with {size(blog['room'])} from a "
        f"disk of {size(blog['rate'])}/s. With all of that memory full of weights, the rest takes "
        f"{bound:.1f} s to read for each token, so those figures need a disk "
        f"{bound / claimed:.0f} times as fast.\n\n"
    )


def _simulated() -> str:
    """What another's simulation gives for slow disks."""
    told = saved("disks")
    if told is None:
        return "\n"
    low, high = told["simulated"]
    return (
        f'\nA simulation of reading ahead ("cascaded prediction") gives {times(low)} to '
        f"{times(high)} times a layer at a time. "
        "Two is the most that overlap can give, and only where computing takes as long as reading; "
        "here reading takes nearly all of the time, and what is kept in memory decides.\n\n"
    )


def _published() -> str:
    """How much slower another's layer at a time is."""
    told = saved("slowdown")
    if told is None:
        return "\n"
    other = told["published"]
    ratio = other["layer at a time"] / other["all"]
    return (
        f"\nThe project llama2.pi gives {other['all']} s per token with all in memory and "
        f"{other['layer at a time']} s a layer at a time, {times(ratio)} times.\n\n"
    )


def _long() -> str:
    """What the picture of a long generation shows."""
    told = saved("slowdown-full") or saved("slowdown")
    if told is None:
        return "\n"
    long, count = told["long"], len(told["long"]["steps"])
    return (
        f"\nThe first tokens took {seconds(long['first'])} each, the last "
        f"{seconds(long['last'])} (medians of {ENDS} of {count}); the process held "
        f"{size(long['peak'])} at most, of {size(long['limit'])}.\n\n"
    )


def _took() -> str:
    """How long the measuring took, by the files."""
    said = []
    for command, full in (("make results", False), ("make results-full", True)):
        stems = [file.stem for file in STORE.glob("*.json")]
        files = [saved(stem) or {} for stem in stems if stem.endswith("-full") == full]
        known = [told["seconds"] for told in files if "seconds" in told]
        if known:
            some = "" if len(known) == len(files) else f" ({len(known)} of {len(files)} files)"
            said.append(f"`{command}` took {sum(known) / 60:.0f} minutes{some}")
    made = "with making the models that were not there"
    return f"\nFor the figures here {' and '.join(said)}, {made}.\n\n" if said else "\n"


def _loaders() -> str:
    """How many loaders pipeload's rows stand beside."""
    told = saved("hermes-sweeps")
    tried = told is not None and all("tried" in r for r in told["rows"] if r["sweep"] == "limit")
    how = "the faster of two loaders and as many as fit" if tried else "as many loaders as fit"
    fewer = "" if tried else "; fewer can be faster"
    return f"\nOver the memory that layers may have (ViT-L/16), with {how}{fewer}:\n\n"


def _rule() -> str:
    """What decides the verdicts on a lossless store."""
    disk = f"{size(SLOW_DISK)}/s"
    return (
        "\nIt keeps up with a disk where the rate at which one core decodes, times the share that "
        f"is left, is above the disk's rate; the first verdict is for {disk}. To be worth building "
        f"it would have to give more than {WORTH} times there: while one byte of two is noise, "
        "half of the bytes are left, and it cannot.\n\n"
    )


TEXTS = {
    "took": _took,
    "loaders": _loaders,
    "rule": _rule,
    "long": _long,
    "blog": _blog,
    "simulated": _simulated,
    "published": _published,
}
