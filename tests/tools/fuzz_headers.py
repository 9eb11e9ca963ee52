"""Throws broken headers and indexes at their parsers: by hand, not in CI.

    python tests/tools/fuzz_headers.py --count 1000000           # mutations
    python tests/tools/fuzz_headers.py --count 1000000 --atheris  # guided by coverage

Every input must be read as entries that lie inside the file, or be refused by a CheckpointError of
one printable line; in a second; and in a process that has no memory for what a header may claim.
Ends with status 1 at the first finding, and says which bytes it was. Without atheris it ends with
the lines and branches of the parsers that inputs reached (where the package coverage is there).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1.0
SPARE_BYTES = 256 << 20
MESSAGE_LETTERS = 4000
PARSERS = ("checkpoint.headers", "checkpoint.untrusted_json", "checkpoint.folder_and_index")
NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 2**64 - 1, 2**64, 10**300, -(2**70), 1.5, 1e308),
    *("", "F32", "BF16", "F4", "../x", "/etc/passwd", "\x1b[31m", "\ud800", "\u202e", "a" * 3000),
    *([], {}, [0], [0, 0], [4, 0], [0, 2**64 - 1], [2**63] * 9, [[]], [{}], {"a": {}}, [1] * 40),
    *("a.safetensors", "./a.safetensors", "b.safetensors", "a\0.safetensors", "a.bin", "C:a"),
]
TOKENS = [
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b"\\u", b"NaN", b"-Infinity", b"1e999", b"null"),
    *(b"\xff", b"\xef\xbb\xbf", b"\0", b" ", b"{" * 3000, b"[" * 3000, b"9" * 500, b'"a":1,'),
    *(b'"dtype"', b'"shape"', b'"data_offsets"', b'"__metadata__"', b'"weight_map"', b'"metadata"'),
]


class FindingError(AssertionError):
    """What must not be."""


class Target:
    """The two parsers, and a folder for what they read."""

    def __init__(self, folder: Path) -> None:
        from pipeload.checkpoint import headers
        from pipeload.errors import CheckpointError

        self._module, self._refusal = headers, CheckpointError
        self._header = folder / "header.safetensors"
        self._index = folder / "model.safetensors.index.json"
        self._shards = [folder / "a.safetensors", folder / "b.safetensors"]
        for shard in self._shards:
            shard.write_bytes(pack(json.dumps(table([(shard.stem, "F32", [1])])[0]).encode()))
            shard.write_bytes(shard.read_bytes() + bytes(4))
        self._folder = folder
        self.outcomes: Counter[str] = Counter()
        self.slowest = 0.0

    def feed(self, data: bytes, *, is_header: bool) -> None:
        """One input; raises what is found."""
        began = time.process_time()
        try:
            with alarm():
                (self._feed_header if is_header else self._feed_index)(data)
            kind = "read"
        except self._refusal as error:
            message = str(error)
            if not message.replace("\n", " ").isprintable() or len(message) > MESSAGE_LETTERS:
                raise FindingError(f"a message that cannot be shown: {message[:200]!r}") from error
            kind = "refused"
        self.outcomes[f"{'header' if is_header else 'index'} {kind}"] += 1
        self.slowest = max(self.slowest, time.process_time() - began)

    def _feed_header(self, data: bytes) -> None:
        self._header.write_bytes(data)
        for entry in self._module.read_header(self._header).values():
            if not 8 <= entry.start <= entry.stop <= len(data):
                raise FindingError(f"{entry} is not inside a file of {len(data)} bytes")

    def _feed_index(self, data: bytes) -> None:
        self._index.write_bytes(data)
        self._module.check_folder(self._folder)
        weight_map = json.loads(data)["weight_map"]
        self._module.open_checkpoint(self._shards, weight_map)
        for shard in set(weight_map.values()):
            if (self._folder / shard).resolve().parent != self._folder.resolve():
                raise FindingError(f"{shard!r} leads out of the folder")


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    """End what takes too long."""

    def ring(*_: object) -> None:
        raise FindingError(f"it takes more than {SECONDS} s")

    # Of its own time: a busy machine is no finding.
    before = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


# -- inputs ----------------------------------------------------------------------------------------


def pack(header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header


def table(rows: list[tuple[str, str, list[int]]]) -> tuple[dict[str, Any], int]:
    """A valid header, and how many bytes follow it."""
    from pipeload.checkpoint.headers import ITEM_BITS

    made: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in rows:
        bits = ITEM_BITS[dtype]
        for length in shape:
            bits *= length
        start, end = end, end + bits // 8
        made[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    return made, end


class Mutator:
    """Valid files, and what becomes of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def header(self) -> bytes:
        pick = self._random
        dtypes = ["F32", "BF16", "U8", "F4", "F6_E2M3", "F64"]
        rows = [
            (f"t{at}", pick.choice(dtypes), [pick.randrange(5) for _ in range(pick.randrange(4))])
            for at in range(pick.randrange(5))
        ]
        made, size = table(rows)
        if pick.random() < 0.3:
            made["__metadata__"] = {"format": "pt"}
        self._spoil_table(made)
        text = self._spoil_bytes(json.dumps(made).encode())
        content = pack(text) + bytes(size)
        return self._spoil_bytes(content) if pick.random() < 0.3 else content

    def index(self) -> bytes:
        pick = self._random
        made: dict[str, Any] = {
            "metadata": {"total_size": 8},
            "weight_map": {"a": "a.safetensors", "b": "b.safetensors"},
        }
        self._spoil_table(made)
        return self._spoil_bytes(json.dumps(made).encode()) if pick.random() < 0.7 else b""

    def _spoil_table(self, made: dict[str, Any]) -> None:
        pick = self._random
        for _ in range(pick.choice((0, 1, 1, 2))):
            where: Any = made
            while isinstance(where, (dict, list)) and where:
                keys = list(where) if isinstance(where, dict) else list(range(len(where)))
                key = pick.choice(keys)
                if pick.random() < 0.5 or not isinstance(where[key], (dict, list)):
                    self._spoil_entry(where, key)
                    break
                where = where[key]

    def _spoil_entry(self, where: Any, key: Any) -> None:
        pick = self._random
        how = pick.randrange(4)
        if how == 0:
            del where[key]
        elif how == 1 and isinstance(where, dict):
            name = pick.choice([n for n in NASTY if isinstance(n, str)])
            where[name] = where.pop(key)
        elif how == 2 and isinstance(where[key], int):
            where[key] += pick.choice((-1, 1, 4, 2**32))
        else:
            where[key] = deepcopy(pick.choice(NASTY))  # it may be spoilt in turn

    def _spoil_bytes(self, content: bytes) -> bytes:
        pick, made = self._random, bytearray(content)
        for _ in range(pick.choice((0, 0, 0, 1, 1, 2, 4))):
            at = pick.randrange(len(made) + 1)
            length = pick.choice((0, 1, 1, 2, 8))
            new = pick.choice((pick.choice(TOKENS), pick.randbytes(pick.randrange(4)), b""))
            made[at : at + length] = new
        return bytes(made)


# -- ways to run -----------------------------------------------------------------------------------


def mutate(target: Target, count: int, seed: int) -> None:
    """Feed so many mutations, three headers to an index."""
    mutator, began = Mutator(seed), time.monotonic()
    for number in range(count):
        is_header = number % 4 != 3
        data = mutator.header() if is_header else mutator.index()
        try:
            target.feed(data, is_header=is_header)
        except BaseException:
            print(f"finding at input {number} of seed {seed}: {data!r}")
            raise
        if number % 100_000 == 99_999:
            rate = (number + 1) / (time.monotonic() - began)
            print(f"{number + 1} inputs, {rate:.0f}/s, slowest {target.slowest:.3f} s", flush=True)


def guided(target: Target, count: int, corpus: Path) -> None:
    """Let atheris look for inputs that reach new branches. Ends the process."""
    import atheris

    mutator = Mutator(0)
    for number in range(200):
        (corpus / f"h{number}").write_bytes(b"h" + mutator.header())
        (corpus / f"l{number}").write_bytes(b"l" + mutator.header()[8:])
        (corpus / f"i{number}").write_bytes(b"i" + mutator.index())
    words = (
        "".join(f"{chr(92)}x{byte:02x}" for byte in token) for token in TOKENS if len(token) < 50
    )
    dictionary = corpus.with_name("dict")
    dictionary.write_text("".join(f'"{word}"\n' for word in words))

    def one(data: bytes) -> None:
        # The length before a header is right in half of the inputs, or few would be parsed.
        kind, rest = data[:1], data[1:]
        if kind == b"l":
            rest = pack(rest)
        target.feed(rest, is_header=kind != b"i")

    options = [f"-runs={count}", f"-dict={dictionary}", "-max_len=4096", "-rss_limit_mb=2048"]
    atheris.Setup([sys.argv[0], *options, "-print_final_stats=1", str(corpus)], one)
    atheris.Fuzz()


def show_coverage(folder: Path, count: int, seed: int) -> None:
    """Feed so many again, and print what of the parsers they reached."""
    try:
        import coverage
    except ImportError:
        return
    for name in PARSERS:
        del sys.modules[f"pipeload.{name}"]  # to be traced from their first line
    files = [f"*/pipeload/{name.replace('.', '/')}.py" for name in PARSERS]
    traced = coverage.Coverage(branch=True, include=files, data_file=None, config_file=False)
    with traced.collect():
        mutate(Target(folder), count, seed)
    traced.report(show_missing=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    where = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as name:
        folder, corpus = Path(name, "checkpoint"), Path(name, "corpus")
        folder.mkdir()
        corpus.mkdir()
        if options.atheris:
            import atheris

            with atheris.instrument_imports(include=[f"pipeload.{name}" for name in PARSERS]):
                target = Target(folder)
            guided(target, options.count, corpus)
            return
        target = Target(folder)
        # Whatever allocates what a header claims has no room for it.
        held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (held + SPARE_BYTES,) * 2)
        began = time.monotonic()
        mutate(target, options.count, options.seed)
        seconds = time.monotonic() - began
        print(f"{options.count} inputs in {seconds:.0f} s: {options.count / seconds:.0f}/s")
        print(f"no finding; slowest {target.slowest:.3f} s; {dict(target.outcomes)}")
        show_coverage(folder, min(options.count, 20_000), options.seed + 1)


if __name__ == "__main__":
    main()
