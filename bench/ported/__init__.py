"""Pairs of which one was ported: other names, another nesting, other shapes of the same weights."""
