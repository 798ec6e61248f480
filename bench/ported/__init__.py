"""Ports between codebases: the same network under other names, in another nesting and in other shapes.

Written by people who had not seen the diagnosis, and judged once: what came out first is kept.
"""
