"""Compressors: what is exchanged instead of a gradient, and how its mean is made of that.

Symbols in the docstrings of this package: n elements of a message, e bytes of an element, P ranks,
k selected elements. Bytes are those that one rank hands over in one exchange. Values, means and
residuals are one-dimensional tensors [n]. A compressor keeps no state of its own: the state of a
message is a dictionary of tensors that each exchange returns for the next.
"""
