"""What the hooks need from whoever holds the weights."""

from __future__ import annotations

from typing import Protocol


class WeightSource(Protocol):
    """Makes the weights of a site, a module that needs some, real while it runs."""

    def acquire(self, site: int) -> object:
        """Return once every parameter of `site` holds its values. May wait for the disk."""

    def release(self, site: int) -> None:
        """The site has run. Must do nothing for one that was never acquired."""

    def refuse_recording(self, site: int) -> None:
        """Autograd would record `site`, whose weights are gone by the time of backward: raise."""
