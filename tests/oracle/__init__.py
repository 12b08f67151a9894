"""NumPy reference implementations of kvfold's formats and operations.

Written from the documentation of the operations (docs/design.md and the header comments), never from their source,
so that a mistake made in one place is not repeated in the other. Clarity comes before speed.
"""
