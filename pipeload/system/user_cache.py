"""Where pipeload keeps, for this user, what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Its folder, which need not be there.

    Raises:
        RuntimeError: nobody knows where this user's home is.
    """
    # The XDG rules: an unset, empty or relative value means the default.
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache.is_absolute():
        cache = Path.home() / ".cache"
    return cache / "pipeload"
