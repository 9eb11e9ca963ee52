"""What commands log to stderr: letters that can be shown, and nothing of the libraries' own."""

from __future__ import annotations

import io
import logging
import sys
import warnings

from pipeload.errors import escape

log = logging.getLogger("pipeload")


class Printable(logging.Formatter):
    """A log line may name what a checkpoint has named."""

    def format(self, record: logging.LogRecord) -> str:
        """As it would be, without letters that steer a terminal."""
        return escape(super().format(record))


def replace_unprintable() -> None:
    """Have letters that the terminal's encoding lacks appear as "?" instead of ending the command.

    Outside UTF-8, as in a pipe on Windows, a model's answer could hold such letters.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def silence_libraries(*, debug: bool) -> None:
    """Keep the libraries' notes and bars off the screen, but for the bars of a download."""
    if debug:
        return
    import huggingface_hub
    import transformers
    from huggingface_hub.utils.tqdm import enable_progress_bars

    from pipeload.formats import registry

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    huggingface_hub.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    for package in registry.packages():  # they may say the same at every product
        logging.getLogger(package).setLevel(logging.ERROR)
    transformers.logging.disable_progress_bar()
    if sys.stderr.isatty() and log.isEnabledFor(logging.INFO):
        enable_progress_bars()
