"""How files are read: which mode "auto" means, and whether a file system takes direct reads.

Three ways to read: "direct" (O_DIRECT, past the page cache), "buffered" (through it), and
"uncached" (through it, then dropped from it), for file systems that refuse direct reads.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from pipeload.errors import OptionError
from pipeload.system.pages import PAGE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

IO_MODES = ("auto", "direct", "buffered", "uncached")
_log = logging.getLogger("pipeload")


def resolve_io_mode(requested: str, files: Sequence[Path], fits_cache: bool) -> str:
    """The mode that "auto" means for these files, which are asked where that counts.

    Raises:
        OptionError: the name is unknown, or the files refuse the mode that was asked for.
    """
    asked = requested == "direct" or (requested == "auto" and not fits_cache)
    refusal = direct_refusal(files) if asked else None
    return choose_io_mode(requested, files, refusal, fits_cache=fits_cache)


def choose_io_mode(
    requested: str, files: Sequence[Path], refusal: str | None, *, fits_cache: bool
) -> str:
    """The mode that "auto" means for files that refuse direct reads so.

    Args:
        requested: one of `IO_MODES`.
        files: paths, for the error alone.
        refusal: as `direct_refusal` gives it.
        fits_cache: whether the page cache has room for all that is streamed.

    Raises:
        OptionError: the name is unknown, or the files refuse the mode that was asked for.
    """
    if requested not in IO_MODES:
        raise OptionError(f"io_mode={requested!r} is unknown. Choose one of {', '.join(IO_MODES)}.")
    if requested == "buffered" or (requested == "auto" and fits_cache):
        return "buffered"
    if requested != "uncached" and refusal is None:
        return "direct"
    if requested == "direct":
        raise OptionError(
            f"io_mode='direct' does not work for {str(files[0])!r}: {refusal}. "
            "Use io_mode='auto', or 'uncached' for reads that leave no page cache behind."
        )
    if hasattr(os, "posix_fadvise"):
        return "uncached"
    _log.info("this system has neither direct reads nor advice on its page cache: buffered reads")
    return "buffered"


def direct_refusal(files: Sequence[Path]) -> str | None:
    """Why direct reads do not work, None when they do. Reads one page."""
    if not hasattr(os, "O_DIRECT") or not hasattr(os, "preadv"):
        return "this system has no direct reads"
    import mmap

    with mmap.mmap(-1, PAGE) as page:
        try:
            descriptor = os.open(files[0], os.O_RDONLY | os.O_DIRECT)
            try:
                os.preadv(descriptor, [page], 0)
            finally:
                os.close(descriptor)
        except OSError as error:
            return str(error)
    return None
