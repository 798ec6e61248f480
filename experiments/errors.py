"""The one error that ends a command with a line and exit status 2."""


class ConfigurationError(ValueError):
    """Something the user gave cannot be used. The message is one line: what, where, what to write instead."""


def one_line(error: BaseException) -> str:
    """The first line that says something, of an error raised by somebody else's code."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
