"""``kvfold verify``: does a kv type keep what a model knows? Measured against f16 on the same text, on this machine.

``measures``: perplexity and divergence on text, facts found again at several depths, a long continuation; ``report``:
thresholds and verdict; ``scoring``: the distributions all of it is computed from.
"""
