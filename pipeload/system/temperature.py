"""How hot the processor is, and whether it has slowed down, where Linux tells."""

from __future__ import annotations

import contextlib
from pathlib import Path


class Sensors:
    """Thermal zones and processor frequencies below a folder like `/sys`."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        self._zones = root / "class" / "thermal"
        self._processors = root / "devices" / "system" / "cpu"

    def celsius(self) -> float | None:
        """The hottest zone; None where nobody measures."""
        files = self._zones.glob("thermal_zone*/temp")
        return max((t / 1000 for t in map(_number, files) if t is not None), default=None)

    def speed(self) -> float | None:
        """The frequency of the fastest processor now, as a share of its highest; None: unknown.

        Idle ones are slow at any temperature, so it says something right after work alone.
        """
        shares = []
        for folder in self._processors.glob("cpu[0-9]*/cpufreq"):
            now, most = _number(folder / "scaling_cur_freq"), _number(folder / "cpuinfo_max_freq")
            if now is not None and most:
                shares.append(now / most)
        return max(shares, default=None)


def _number(file: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):  # a zone that is off gives no number
        return int(file.read_text(encoding="ascii"))
    return None
