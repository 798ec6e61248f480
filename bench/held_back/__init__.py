"""Pairs written by people who had not seen the diagnosis, after it was last changed, and judged once.

``third_*`` and ``fourth_*``, faults in ports alone, were written after what ``first_*`` and ``second_*`` had
shown was mended. 32 labels were widened when they had been judged: a right pair may be equal bit for bit (5),
its reference diverge (11), or torch's own gradient be wrong (5); rounding to bfloat16 be called fewer bits
(1), and the gradient of a weight one of the input of its parametrization (1), or of its module (4), or be the
affair of the list that owns it (1); halves of a kernel exchanged are halves of what it reads exchanged (1),
and what a module is handed is its caller's affair (3).
One batch has learnt to ask for the gradient of its inputs, in which alone a fault shows (PatchTST's scaler),
and one right port to take silence, of which its norm made no numbers (of a band-split network): for that it
was called a bug at first sight.

``sixth_*``, four networks in flat code, was judged when modules had learnt to be silenced; ``seventh_*``,
five more, when one change of the reference had learnt to tell the place; ``eighth_*``, four more, when such
changes had learnt of other orders and of weights; ``ninth_*``, six more, each ported twice: as a tree of
other modules, and as flat code; ``tenth_*``, six more of that kind, when values of the candidate's had learnt
to stand in for the reference's; ``eleventh_*``, six more, when these were sought by what is nearest;
``twelfth_*``, six more, when all calls in a module that take one value were changed together;
``thirteenth_*``, six more, when these were judged; ``fourteenth_*``, six more, when rows that one network
leaves out had learnt to be left out.

Each of these sets took networks of kinds that none before it had. ``fifteenth_*`` to ``twenty_eighth_*`` are
of the kinds that people port most, which earlier sets had as well: other code, other faults, other writers.
``twenty_ninth_*`` to ``thirty_fifth_*`` are of both, ternary weights, an ODE and a CRF among them;
``thirty_sixth_*`` to ``forty_second_*`` of kinds that were hardly there: noise in linear layers, reversible
streams, a spline flow, deformable kernels, long convolutions, a memory that is read and written.
``forty_third_*`` to ``forty_eighth_*`` are of both again, a penalty on gradients, policies, stereo matching,
trackers and adapters among them; so are ``forty_ninth_*`` to ``fifty_third_*``: messages on graphs, tables,
trees, streams of speech, depth from motion, a ladder of latents.
"""
