"""The parts of ``scripts/check_gpu.py``, one file each."""

from scripts.gpu_parts import doors, forecast, gpu_tests, kernels, machine, times, verdicts

MACHINE = machine.PART
# In the order in which they run: the longest last, for which the others leave what they do not need.
PARTS = (kernels.PART, times.PART, doors.PART, gpu_tests.PART, forecast.PART, verdicts.PART)
