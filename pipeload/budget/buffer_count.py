"""How many buffers streamed weights pass through."""

from __future__ import annotations

BUFFER_COUNT = 2
"""One unit is in use while the next one is read."""
