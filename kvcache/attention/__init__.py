"""One pass: the batch by sequences, where its tokens are placed, the plan of what is read, attention over it.

Others use ``split_batch`` and ``SequenceTokens`` (``batch``), ``ForwardPass``, ``place``, ``put_layer`` and
``put_stored_layer`` (``forward_pass``), ``ReadPlan`` (``plan``), ``attend`` and ``Kernels`` (``attend``),
``History`` and ``LowerBound`` (``history``), ``FixedPass`` and ``GraphRows`` (``fixed_shapes``).

From a plan to a result: ``history`` (what ``get`` reads) with ``masks``; ``segments``, then ``calls`` or a
backend's kernel; ``fixed_shapes``.
"""
