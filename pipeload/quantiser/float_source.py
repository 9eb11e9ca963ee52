"""What `quantize` reads: the stored tensors of a float checkpoint, and what each becomes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeload.checkpoint.file_reads import FileSet
from pipeload.checkpoint.fingerprint import fingerprint
from pipeload.checkpoint.headers import stamps_of
from pipeload.checkpoint.hung_reads import resolve_timeout
from pipeload.quantiser import experts
from pipeload.quantiser.model_card import Floats
from pipeload.quantiser.tensor import Reading, copied

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pipeload.hf.pending_load import PendingLoad
    from pipeload.quantiser.calibration import Importances
    from pipeload.quantiser.forms import Form, IntegerForm
    from pipeload.quantiser.options import Choice
    from pipeload.quantiser.resumable_shards import Step


class FloatSource:
    """The stored tensors of a float checkpoint, and what each becomes."""

    def __init__(self, pending: PendingLoad, form: Form, choice: Choice) -> None:
        """What `choice` names becomes `form`; all else stays as it is stored."""
        entries = sorted(pending.checkpoint.entries.values(), key=lambda e: (str(e.file), e.start))
        self._files = FileSet(
            pending.files, "buffered", resolve_timeout("auto"), stamps_of(entries)
        )
        self._for_experts, self.choice = form.for_experts, choice
        self._convert = pending.converter(hold_model=True)
        self.linears = {name: (module, form) for name, module in choice.linears.items()}
        """With their forms, by the names of what is stored; a head that is quantised, too."""
        self._experts = {one.sources[0].name: one for one in choice.experts}
        self._of_experts = {source.name for one in choice.experts for source in one.sources}
        if (head := choice.head) is not None:
            self.linears[head.name] = head.module, head.form
            if head.is_tied:
                table = pending.checkpoint.entries[head.source]
                entries.insert(entries.index(table) + 1, replace(table, name=head.name))
        self._entries = entries

    def floats(self) -> Floats:
        """What stays as it is."""
        counts = {entry.name: math.prod(entry.shape) for entry in self._entries}
        return Floats(counts, without=self.linears.keys() | self._of_experts)

    def digest(self) -> str:
        """What tells the source from other checkpoints."""
        return fingerprint(self._files)

    def columns(self) -> dict[str, int]:
        """Those of each Linear that a text may tell of, by its path."""
        linears = self.choice.linears
        return {path: linears[name].in_features for name, path in self.choice.paths.items()}

    @property
    def parts(self) -> int:
        """How many quantised weights are stored."""
        linears = self.linears.values()
        return sum(form.parts(module) for module, form in linears) + len(self._experts)

    def reading(self, items: int) -> Reading:
        """From the files, so many numbers at once."""
        return Reading(self._files, items)

    def take(self, forms: Mapping[str, IntegerForm]) -> dict[str, dict[str, int]]:
        """Give each Linear its form, by path; gives what config.json says of them."""
        for name, path in self.choice.paths.items():
            self.linears[name] = self.choice.linears[name], forms[path]
        return {path: form.told() for path, form in forms.items()}

    def steps(self, reading: Reading, known: Importances) -> list[Step]:
        """What is written, in the order of the files."""
        steps: list[Step] = []
        for entry in self._entries:
            if entry.name in self.linears:
                module, form = self.linears[entry.name]
                inputs = known.of(self.choice.paths.get(entry.name, ""))
                steps.append(form.step(entry, module, reading, inputs))
            elif entry.name in self._experts:
                assert self._for_experts is not None  # noqa: S101 - else none are found
                one, inputs_of = self._experts[entry.name], known.mean_squares
                steps.append(
                    experts.step(one, self._for_experts, reading, inputs_of, self._convert)
                )
            elif entry.name not in self._of_experts:
                steps.append(copied(entry, self._files))
        return steps
