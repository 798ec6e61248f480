"""Ports between codebases: the candidate is the same network under other names and in other shapes."""
