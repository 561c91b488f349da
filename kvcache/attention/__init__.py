"""One forward pass: the batch split by sequence, placement of its tokens, the plan of reads, and attention.

Used by other packages: ``split_batch`` and ``SequenceTokens`` (``batch``), ``ForwardPass``, ``place``,
``put_layer`` and ``put_stored_layer`` (``forward_pass``), ``ReadPlan`` (``plan``), ``attend`` and ``Kernels``
(``attend``), ``History`` and ``LowerBound`` (``history``), ``FixedPass`` and ``GraphRows``
(``fixed_shapes``). For runtimes with calls, masks or copies of their own: ``DenseBatch``,
``PassReads``, ``LayerCells`` and ``StepReads``, which ``kvcache`` exports.

From a plan to a result: ``history`` (what ``get`` reads) with ``masks``; ``segments``, then ``calls`` or a
backend's kernel; ``fixed_shapes``.
"""
