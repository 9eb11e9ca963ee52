"""Records that people look at: a table as text, in a notebook, and for rich."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

_NAME_WIDTH = 16
_VALUE_WIDTH = 10


class Row(NamedTuple):
    """One line: what, how much, and where a word more is needed."""

    name: str
    value: str
    note: str = ""


def as_text(rows: Sequence[Row]) -> str:
    """One line for each row."""
    if any(row.note for row in rows):
        return "\n".join(f"{n:<{_NAME_WIDTH}}{v:>{_VALUE_WIDTH}}  {note}" for n, v, note in rows)
    return "\n".join(f"{name:<{_NAME_WIDTH}}{value}" for name, value, _ in rows)


class Tabled:
    """What `_rows` says is a table, however it is looked at."""

    __slots__ = ()

    @abstractmethod
    def _rows(self) -> list[Row]:
        """Each line of the table, from the top."""

    def _caption(self) -> str:
        """A sentence below the table; empty when there is none."""
        return ""

    def table(self) -> str:
        """The table as text, one line for each row."""
        return "\n".join(filter(None, [as_text(self._rows()), self._caption()]))

    def __rich__(self) -> Table:
        from rich import box
        from rich.table import Table

        rows = self._rows()
        noted = any(row.note for row in rows)
        table = Table(
            title=type(self).__name__.lower(),
            caption=self._caption() or None,
            show_header=False,
            box=box.SIMPLE,
        )
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=noted, justify="right" if noted else "left")
        if noted:
            table.add_column()
        for row in rows:
            table.add_row(*row[: 3 if noted else 2])
        return table

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        """What IPython shows for the last expression of a cell, and text where there is no HTML."""
        drawn = self.__rich__()._repr_mimebundle_((), ())
        return {"text/html": drawn["text/html"], "text/plain": self.table()}
