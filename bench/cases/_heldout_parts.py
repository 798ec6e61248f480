"""What the held-out rewrites share: filling a module with weights taken from another, under other names."""

from __future__ import annotations


def flat_name(name: str) -> str:
    """A parameter's dotted name as a key that ``nn.ParameterDict`` takes."""
    return name.replace(".", "_")
