"""``kvfold calibrate``: how much every layer of a model has to read, measured on the user's text.

``study``: look-ups of one layer or all, against reading everything; ``schedule``: the shares of a given sum that cost
least; ``run``: both, a check on text that was not measured, and the side file (``kvfold.calibration``).
"""
