"""The parts of ``scripts/long_run.py``: what each rule says, the numbers along the run, tables and figure."""
