"""The benchmark's own fixed reader: how fast this disk gives these files, with nothing else to do.

Independent of the product's readers, so that their faults cannot hide in the yardstick. Direct
reads of 16 MB by four threads into huge pages, from all shards in turn; imports no torch.

    python -m pipeload.bench.reader SECONDS FILE...
"""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_CHUNK = 16 << 20
_THREADS = 4


def read_rate(files: Sequence[Path], seconds: float) -> float:
    """Bytes per second of direct reads over about `seconds` seconds.

    Raises:
        OSError: the file system or the operating system refuses direct reads.
    """
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        raise OSError(errno.ENOTSUP, "this system has no direct reads")
    chunks = [
        (path, start)
        for path in files
        for start in range(0, max(1, path.stat().st_size - _CHUNK + 1), _CHUNK)
    ]
    handles = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in files}
    lock = threading.Lock()
    # The clock starts when every thread has read once: opening and warming up are not the disk's.
    warm = threading.Barrier(_THREADS + 1)
    counts = [0] * _THREADS
    position = 0
    errors: list[OSError] = []

    def work(number: int, buffer: mmap.mmap) -> None:
        nonlocal position
        try:
            os.preadv(handles[files[0]], [buffer], 0)
            warm.wait()
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                with lock:
                    path, start = chunks[position % len(chunks)]
                    position += 1
                counts[number] += os.preadv(handles[path], [buffer], start)
        except OSError as error:
            errors.append(error)
            warm.abort()
        except threading.BrokenBarrierError:
            pass  # another thread has the reason

    threads = [threading.Thread(target=work, args=(n, _buffer())) for n in range(_THREADS)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        warm.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    elapsed = time.perf_counter() - started
    for handle in handles.values():
        os.close(handle)
    if errors:
        raise errors[0]
    return sum(counts) / elapsed


def _buffer() -> mmap.mmap:
    buffer = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    buffer.write(bytes(_CHUNK))  # the first touch is not part of the rate
    return buffer


def main(arguments: Sequence[str]) -> None:
    """Print the rate as JSON."""
    rate = read_rate([Path(name) for name in arguments[1:]], float(arguments[0]))
    sys.stdout.write(json.dumps({"rate": rate}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
