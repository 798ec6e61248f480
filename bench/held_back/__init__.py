"""Pairs written by people who had not seen the diagnosis, after it was last changed, and judged once."""
