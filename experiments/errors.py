"""The two errors that end a command with a line: exit status 2 and 1."""


class ConfigurationError(ValueError):
    """Something the user gave cannot be used. The message is one line: what, where, what to write instead."""


class Unfinished(Exception):  # noqa: N818 (nothing was wrong)
    """The run was stopped by its surroundings (a full disk, say); the same command goes on. Exit status 1.

    The message is one line: what, where, how far the seed came, what to do.
    """


def is_out_of_memory(error: BaseException) -> bool:
    """By name, since who asks may not want to wait for torch, whose error it mostly is."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def one_line(error: BaseException) -> str:
    """The first line that says something, of an error raised by somebody else's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
