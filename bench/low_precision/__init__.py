"""Small kernels in bfloat16 and float16 on the CPU, as kernel authors have them: right, wrong, in fewer bits.

They were written by people who had not seen the diagnosis. ``held_out_*`` is the half that is judged last.
"""
