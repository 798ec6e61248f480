"""Each of several test processes computes on one thread: two that share the cores wait for each other."""

import os

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anybody imports torch
