"""`--max-temperature`: waiting between two passes until the processor is cool enough."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import torch
import transformers

from pipeload._text_tables import Row
from pipeload.cli.log_lines import log
from pipeload.errors import OptionError
from pipeload.system.temperature import Sensors

if TYPE_CHECKING:
    from pathlib import Path

LOWER_BY = 2.0
"""Degrees below the most at which it goes on: at the most itself it would stop again at once."""
SLOW = 0.9
"""Of the highest frequency: below, the system has slowed the processor down."""
_LOOK_SECONDS = 1.0
_REMIND_SECONDS = 60.0
_Event = threading.Event


class Cooling(transformers.StoppingCriteria):
    """Called by `generate()` after each pass; ends nothing, and waits where it is too hot.

    Requests that run at once share one: whoever comes first waits, and the others behind it.
    """

    keeps_nothing = True
    """From one call to the next: a request with it may be begun again."""
    takes_several = True
    """It sees what has come since the last call, not the latest token alone."""

    def __init__(self, most: float, root: Path | None = None) -> None:
        """`most`: degrees Celsius. `root`: in the place of `/sys`.

        Raises:
            OptionError: nobody tells how hot it is.
        """
        self._sensors = Sensors() if root is None else Sensors(root)
        self._most = most
        self._lock = threading.Lock()
        self._over = _Event()
        self._waited_at = -_LOOK_SECONDS
        self.seconds = 0.0
        """That it has waited."""
        hottest = self._sensors.celsius()
        if hottest is None:
            raise OptionError(
                "--max-temperature needs a system that tells how hot it is, and this one has no "
                "thermal zone. Leave the option out."
            )
        self.hottest = hottest
        self.slowest = 1.0
        """The lowest frequency after a pass, as a share of the highest there is."""

    def end(self) -> None:
        """Wait no more, in no thread: all is to end."""
        self._over.set()

    def __call__(self, ids: torch.Tensor, _scores: object, **_options: object) -> torch.Tensor:
        """Wait, if need be; that no answer ends, bool `[answers]`."""
        with self._lock:
            self._wait()
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    def _wait(self) -> None:
        if time.monotonic() - self._waited_at >= _LOOK_SECONDS:  # idle ones are slow, too
            self.slowest = min(self.slowest, self._sensors.speed() or 1.0)
        now = self._sensors.celsius()
        self.hottest = max(self.hottest, now or 0.0)
        if now is None or now <= self._most:
            return
        log.info("%.0f degrees: waiting until it is %.0f", now, self._most - LOWER_BY)
        began = told = time.monotonic()
        while now is not None and now > self._most - LOWER_BY:
            if self._over.wait(_LOOK_SECONDS):
                break
            now = self._sensors.celsius()
            if time.monotonic() - told >= _REMIND_SECONDS:
                told = time.monotonic()
                log.warning("still %.0f degrees: is --max-temperature too low?", now or 0.0)
        self._waited_at = time.monotonic()
        self.seconds += self._waited_at - began

    def rows(self) -> list[Row]:
        """What came of it, for people."""
        rows = [Row("waited to cool", f"{self.seconds:.3g} s, at most {self.hottest:.0f} degrees")]
        if self.slowest < SLOW:
            rows.append(Row("processor", f"slowed down to {self.slowest:.0%} of its frequency"))
        return rows

    def as_dict(self) -> dict[str, float]:
        """The same for JSON: seconds, degrees Celsius, a share."""
        return {
            "cooling_seconds": self.seconds,
            "hottest_celsius": self.hottest,
            "lowest_frequency": self.slowest,
        }
