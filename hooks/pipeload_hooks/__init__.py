"""Find the repeated blocks of a model, and bind weights to them while they run.

The lower half of pipeload: it knows torch and nothing of files, threads or limits. A `WeightSource`
supplies the weights; `attach` calls it around every block.
"""

from __future__ import annotations

from pipeload_hooks._answers import MOST_COMPUTED, UnknownValueError
from pipeload_hooks._attach import Attachment, attach, inside_compiled_call
from pipeload_hooks._attention_thread import AttentionAside, is_watched, kernels_stay
from pipeload_hooks._binding import (
    Binding,
    Bound,
    Companion,
    bind,
    bind_for_long,
    is_placeholder,
    placeholder,
    put_parameter,
    set_parameter,
    unbind,
)
from pipeload_hooks._blocks import Block, find_blocks, find_decoder_blocks
from pipeload_hooks._callers import Caller, Callers, Mark, arguments_of
from pipeload_hooks._crossing import Crossing, find_crossing
from pipeload_hooks._elsewhere import answer, around, guard
from pipeload_hooks._evicted import BESIDE, OnUse, note_changes, plain_kind
from pipeload_hooks._expert_code import (
    names_of_others,
    takes_slices_alone,
    views_slices_alone,
)
from pipeload_hooks._experts import (
    COUNTS,
    IDS,
    MARKS,
    ExpertSource,
    ServeExperts,
    Service,
    attach_experts,
    empty_grouped,
    experts_at_hand,
)
from pipeload_hooks._growth import TreeWatch
from pipeload_hooks._head_by_head import attend_head_by_head
from pipeload_hooks._lookup import takes_ids
from pipeload_hooks._modes import discard_ended
from pipeload_hooks._passes import PassGate
from pipeload_hooks._rows import RowSource, attach_rows
from pipeload_hooks._source import WeightSource
from pipeload_hooks._split import (
    SplitSource,
    attach_split,
    can_split,
    computes_linear,
    restore_split,
    share_rows,
)
from pipeload_hooks._trial import Repeated, TooLongError, Trial, try_out
from pipeload_hooks._usage import Usage, observe_usage
from pipeload_hooks._watch import EvictedWeightWatch

__all__ = [
    "BESIDE",
    "COUNTS",
    "IDS",
    "MARKS",
    "MOST_COMPUTED",
    "Attachment",
    "AttentionAside",
    "Binding",
    "Block",
    "Bound",
    "Caller",
    "Callers",
    "Companion",
    "Crossing",
    "EvictedWeightWatch",
    "ExpertSource",
    "Mark",
    "OnUse",
    "PassGate",
    "Repeated",
    "RowSource",
    "ServeExperts",
    "Service",
    "SplitSource",
    "TooLongError",
    "TreeWatch",
    "Trial",
    "UnknownValueError",
    "Usage",
    "WeightSource",
    "answer",
    "arguments_of",
    "around",
    "attach",
    "attach_experts",
    "attach_rows",
    "attach_split",
    "attend_head_by_head",
    "bind",
    "bind_for_long",
    "can_split",
    "computes_linear",
    "discard_ended",
    "empty_grouped",
    "experts_at_hand",
    "find_blocks",
    "find_crossing",
    "find_decoder_blocks",
    "guard",
    "inside_compiled_call",
    "is_placeholder",
    "is_watched",
    "kernels_stay",
    "names_of_others",
    "note_changes",
    "observe_usage",
    "placeholder",
    "plain_kind",
    "put_parameter",
    "restore_split",
    "set_parameter",
    "share_rows",
    "takes_ids",
    "takes_slices_alone",
    "try_out",
    "unbind",
    "views_slices_alone",
]
