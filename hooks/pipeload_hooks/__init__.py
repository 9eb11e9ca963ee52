"""Find the repeated blocks of a model, and bind weights to them while they run.

The lower half of pipeload: it knows torch and nothing of files, threads or limits. A `WeightSource`
supplies the weights; `attach` calls it around every block.
"""

from __future__ import annotations

from pipeload_hooks._attach import Attachment, attach, inside_compiled_call
from pipeload_hooks._binding import (
    Binding,
    Bound,
    Companion,
    bind,
    is_placeholder,
    placeholder,
    put_parameter,
    set_parameter,
    unbind,
)
from pipeload_hooks._blocks import Block, find_blocks
from pipeload_hooks._growth import TreeWatch
from pipeload_hooks._lookup import takes_ids
from pipeload_hooks._passes import PassGate
from pipeload_hooks._rows import RowSource, attach_rows
from pipeload_hooks._source import WeightSource
from pipeload_hooks._split import SplitSource, attach_split, can_split, restore_split
from pipeload_hooks._trial import MOST_COMPUTED, Repeated, Trial, try_out
from pipeload_hooks._usage import Usage, observe_usage
from pipeload_hooks._watch import HARMLESS, EvictedWeightWatch, discard_ended

__all__ = [
    "HARMLESS",
    "MOST_COMPUTED",
    "Attachment",
    "Binding",
    "Block",
    "Bound",
    "Companion",
    "EvictedWeightWatch",
    "PassGate",
    "Repeated",
    "RowSource",
    "SplitSource",
    "TreeWatch",
    "Trial",
    "Usage",
    "WeightSource",
    "attach",
    "attach_rows",
    "attach_split",
    "bind",
    "can_split",
    "discard_ended",
    "find_blocks",
    "inside_compiled_call",
    "is_placeholder",
    "observe_usage",
    "placeholder",
    "put_parameter",
    "restore_split",
    "set_parameter",
    "takes_ids",
    "try_out",
    "unbind",
]
