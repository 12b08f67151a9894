"""``kvfold bench``: memory, speed and accuracy over contexts, kv types and threads, kept as JSON and shown as Markdown.

``worker``: one run in a process of its own; ``sweep``: many of them; ``machine``: where they ran; ``report``: tables,
plots and comparisons.
"""
