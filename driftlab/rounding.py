"""What rounding may do, as numbers: unit round-offs, and the thresholds that follow from them.

Thresholds sit halfway, in powers of two, between what the two hypotheses predict: neither is favoured.
"""

from __future__ import annotations

UNIT_ROUND_OFF = {"float32": 2.0**-24, "float64": 2.0**-53}
# Of what is computed in 16 bits, by how the names of precisions begin.
UNIT_IN_16_BITS = {"bf16": 2.0**-8, "16": 2.0**-11}

# Rounding shrinks by 2^-29 from float32 to float64, a wrong function by nothing. A float64 pair that
# stands 2^14.5 above its control is as far from the one prediction as from the other.
HALFWAY = 2.0**14.5
# float32 keeps 24 bits of a product's operands, TF32 and float16 11, bfloat16 8. The nearest of these
# errs 2^13 more than float32, so halfway is 2^6.5.
HALFWAY_BITS = 2.0**6.5
# In 16 bits there is no narrower format to stand halfway to: an accumulator or a softmax that is left in
# them errs some times more than one in float32. Of right rewrites that round at other places 0.7 to 3.3 times
# as much was seen (68 of our own), and of the 54 by others one above 4, whose gradient is stored in float16.
NARROWER = 4.0
# A candidate in 16 bits beside its control there, which computes with every weight a unit off: halfway, in
# powers of two, between one rounding of bfloat16, 2^-8, and a wrong function, 1. Of 798 right runs the
# furthest stood at 5.8 (python -m bench.low_precision.arms).
BESIDE_16_BITS = 2.0**4
# Below this float64 distance a rounding error does not reach a kink by chance: fewer than 1e8
# pre-activations, at most about one unit of density each, make less than one flip in a hundred steps.
NO_KINK_IN_REACH = 1e-10
# Stands for an infinite excess, where a report needs a number.
BEYOND = 1e300
