"""The reference once more with a mistake in it: which mistake makes the candidate of it, and where?

Three doors: ``explanations`` for a result that is wrong (a factor, another setting of one call),
``fitting`` for a mistake anywhere in the network, ``stopped`` for a gradient on its way back.
"""
