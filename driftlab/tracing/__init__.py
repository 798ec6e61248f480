"""Where two networks part whose modules cannot be paired: by the values that pass through both.

``parting.parting`` is the door: it records the ``flow`` of each, recognises equal values by their ``prints``,
cuts out the ``cone`` in which they differ, and asks by ``silencing`` which of several beginnings counts.
``exchange.exchanged`` is the other: which value of the candidate's, put in the place of the reference's that
makes a pair with it, makes the candidate's results of the reference's.
"""
