"""What a run's network, rewrite or optimizer raises, at whatever call: one line, and no traceback."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from driftlab.blame import described, is_ours, is_out_of_memory
from driftlab.words import DiagnoseError
from suite.command.command_line import ROOT
from suite.command.errors import ConfigurationError, exit_called
from suite.command.supervision import Stopped

ROOMS = tuple(str(ROOT / room) for room in ("suite", "experiments", "hydra_plugins", "train.py"))
_OF_DRIFTLAB = (*ROOMS, str(ROOT / "driftlab"))


@contextmanager
def told(stands: Callable[[], str]) -> Iterator[None]:
    """Turns what the user's code raises inside into a line, ``sys.exit`` and the like too.

    Args:
        stands: how far the run has come, as in "seed 3 begins again".

    Raises:
        ConfigurationError: in place of any error of the user's code but a lack of memory.
    """
    try:
        yield
    except BaseException as error:
        line = line_of(error)
        if line is None:
            raise
        raise ConfigurationError(f"{line}; {stands()}") from None


def let_end(error: BaseException) -> None:
    """For whoever catches all that the user's code raises: what is not its fault is raised again.

    That is what asks this process to end, and a lack of memory: fewer seeds at a time may fit.
    """
    cause = error.__cause__  # Hydra wraps what a target raises
    if cause is not None and is_out_of_memory(cause):
        raise cause
    if isinstance(error, Stopped | KeyboardInterrupt | SystemExit) or is_out_of_memory(error):
        raise error


def line_of(error: BaseException) -> str | None:
    """Type, message, file and line of what the user's code raised; None of any other error."""
    if isinstance(error, Stopped | KeyboardInterrupt) or is_out_of_memory(error) or is_ours(error, ROOMS):
        return None
    if isinstance(error, SystemExit):
        return exit_called(error)
    if isinstance(error, DiagnoseError):
        return str(error)
    said = described(_since_ours(error), 200)
    return f"the network, its rewrite or its optimizer failed: {said}"


def _since_ours(error: BaseException) -> BaseException:
    """Less what called driftlab's own code: nothing of that is the place of the error."""
    last = here = error.__traceback__
    while here is not None:
        if here.tb_frame.f_code.co_filename.startswith(_OF_DRIFTLAB):
            last = here
        here = here.tb_next
    return error.with_traceback(last)
