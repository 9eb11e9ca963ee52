"""A file system of one folder, read only, whose disk can be made to hang or fail: real reads.

    python tests/support/fuse_disk.py FOLDER MOUNT_POINT KIND

Needs root and /dev/fuse. Mounts FOLDER at MOUNT_POINT as file system KIND ("fuse.sshfs", say), then
says "ready". Takes words from stdin, each answered by itself: "hang", "fail", "well". Ends with it.
The process that reads must not be this one: it could wait for itself.
"""

from __future__ import annotations

import ctypes
import errno
import os
import selectors
import stat
import struct
import sys
from pathlib import Path

_LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _STATFS, _RELEASE = 1, 2, 3, 14, 15, 17, 18
_FLUSH, _INIT, _OPENDIR, _READDIR, _RELEASEDIR, _BATCH_FORGET = 25, 26, 27, 28, 29, 42
_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, node, uid, gid, pid, padding
_OUT = struct.Struct("<IiQ")  # length, error, unique
_ROOT = 1
_MS_RDONLY, _MNT_DETACH = 1, 2


class Server:
    """Answers the kernel's requests."""

    def __init__(self, folder: Path, point: Path, kind: str) -> None:
        self._paths = {_ROOT: folder}
        for node, path in enumerate(sorted(folder.iterdir()), start=2):
            self._paths[node] = path
        self._device = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self._device},rootmode=40000,user_id=0,group_id=0,allow_other"
        libc = ctypes.CDLL(None, use_errno=True)
        arguments = (b"tests", os.fsencode(point), kind.encode(), _MS_RDONLY, options.encode())
        if libc.mount(*arguments) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        self._libc, self._point = libc, point
        self._state = "well"
        self._held: list[tuple[int, bytes]] = []

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._device, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        try:
            while True:
                for key, _ in selector.select():
                    if key.fd == self._device:
                        self._answer(os.read(self._device, 1 << 20))
                    elif not (word := sys.stdin.readline().strip()):
                        return
                    else:
                        self._become(word)
        finally:
            self._state = "fail"
            self._let_go()
            self._libc.umount2(os.fsencode(self._point), _MNT_DETACH)

    def _become(self, word: str) -> None:
        self._state = word
        if word != "hang":
            self._let_go()
        print(word, flush=True)

    def _let_go(self) -> None:
        while self._held:
            self._read(*self._held.pop())

    def _answer(self, request: bytes) -> None:
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        body = request[_IN.size :]
        if opcode in {_FORGET, _BATCH_FORGET}:
            return
        if opcode == _INIT:
            major, minor, ahead, _ = struct.unpack_from("<IIII", body)
            made = struct.pack("<IIIIHHI", major, min(minor, 22), ahead, 0, 12, 9, 1 << 17)
            self._reply(unique, made + bytes(2 * 2 + 4 * 9 - 4))
        elif opcode == _LOOKUP:
            self._look_up(unique, node, body.rstrip(b"\0"))
        elif opcode == _GETATTR:
            self._reply(unique, bytes(16) + self._attributes(node))
        elif opcode in {_OPEN, _OPENDIR}:
            self._reply(unique, struct.pack("<QII", 0, 0, 0))
        elif opcode == _READ:
            self._read(unique, struct.pack("<Q", node) + body)
        elif opcode == _READDIR:
            self._list(unique, body)
        elif opcode == _STATFS:
            self._reply(
                unique, struct.pack("<QQQQQIIII", 0, 0, 0, 0, 0, 4096, 255, 4096, 0) + bytes(24)
            )
        elif opcode in {_RELEASE, _RELEASEDIR, _FLUSH}:
            self._reply(unique)
        else:
            self._reply(unique, error=errno.ENOSYS)

    def _look_up(self, unique: int, parent: int, name: bytes) -> None:
        for node, path in self._paths.items():
            if parent == _ROOT and node != _ROOT and os.fsencode(path.name) == name:
                entry = struct.pack("<QQQQII", node, 0, 1, 1, 0, 0)
                self._reply(unique, entry + self._attributes(node))
                return
        self._reply(unique, error=errno.ENOENT)

    def _attributes(self, node: int) -> bytes:
        found = self._paths[node].stat()
        mode = found.st_mode & ~0o222 if stat.S_ISREG(found.st_mode) else stat.S_IFDIR | 0o555
        size, blocks, second = found.st_size, found.st_blocks, int(found.st_mtime)
        times = struct.pack("<QQQIII", second, second, second, 0, 0, 0)
        ids = struct.pack("<IIIIIII", mode, 1, 0, 0, 0, 4096, 0)
        return struct.pack("<QQQ", node, size, blocks) + times + ids

    def _list(self, unique: int, body: bytes) -> None:
        _, offset, size = struct.unpack_from("<QQI", body)
        made = b""
        for number, (node, path) in enumerate(list(self._paths.items())[1:], start=1):
            name = os.fsencode(path.name)
            entry = struct.pack("<QQII", node, number, len(name), stat.S_IFREG >> 12) + name
            entry += bytes(-len(entry) % 8)
            if number > offset and len(made) + len(entry) <= size:
                made += entry
        self._reply(unique, made)

    def _read(self, unique: int, body: bytes) -> None:
        if self._state == "hang":
            self._held.append((unique, body))
            return
        if self._state == "fail":
            self._reply(unique, error=errno.EIO)
            return
        node, _, offset, size = struct.unpack_from("<QQQI", body)
        with self._paths[node].open("rb") as file:
            file.seek(offset)
            self._reply(unique, file.read(size))

    def _reply(self, unique: int, body: bytes = b"", error: int = 0) -> None:
        answer = _OUT.pack(_OUT.size + len(body), -error, unique) + body
        try:
            os.write(self._device, answer)
        except OSError as failure:  # whoever asked was killed meanwhile
            if failure.errno != errno.ENOENT:
                raise


if __name__ == "__main__":
    Server(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]).serve()
