"""Which file system a file is on: a network is slower than any disk, and may stop answering."""

from __future__ import annotations

import os
import re
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_MOUNTS: Final = Path("/proc/self/mounts")
_NETWORK: Final = re.compile(
    "9p|afs|beegfs|ceph|cifs|coda|drvfs|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|smb3"
    "|smbfs|vboxsf|vmhgfs|fuse[.](blobfuse2?|ceph|ceph-fuse|cifs|curlftpfs|davfs|gcsfuse|glusterfs"
    "|goofys|juicefs|mount-s3|rclone|s3fs|smbnetfs|sshfs|vmhgfs-fuse)"
)


class Mount(NamedTuple):
    """A line of the system's table of mounts."""

    point: str
    kind: str
    source: str


def network_mount(path: Path) -> Mount | None:
    """The network mount that `path` is on; None for any other, and where that cannot be known."""
    name = os.path.realpath(path)
    # The deepest one; of two at one place, the later covers the earlier.
    found = max(
        (mount for mount in _mounts() if _is_below(name, mount.point)),
        key=lambda mount: len(mount.point),
        default=None,
    )
    return found if found is not None and _NETWORK.fullmatch(found.kind) else None


def warn_of_network(files: Sequence[Path]) -> bool:
    """Whether a file is on a network mount; says so once for each mount in a process."""
    folders = {Path(os.path.realpath(file)).parent for file in files}
    mounts = {mount for mount in map(network_mount, folders) if mount is not None}
    for mount in sorted(mounts - _warned):
        _warned.add(mount)
        warnings.warn(
            f"the checkpoint is on a network file system ({mount.kind}, {mount.source!r} at "
            f"{mount.point!r}): every pass reads the weights through the network. A copy on a "
            "local disk is faster, and goes on when the network does not.",
            stacklevel=2,
        )
    return bool(mounts)


_warned: set[Mount] = set()


def _mounts() -> Iterator[Mount]:
    """The mounts of this process, later ones first."""
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:  # noqa: PTH123
            lines = file.readlines()
    except OSError:  # another system
        return
    for line in reversed(lines):
        source, point, kind, *_ = line.split(" ")
        yield Mount(_plain(point), kind, _plain(source))


def _plain(text: str) -> str:
    """Without the escapes for spaces and line ends, which are octal."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


def _is_below(name: str, point: str) -> bool:
    return point in {"/", name} or name.startswith(point + "/")
