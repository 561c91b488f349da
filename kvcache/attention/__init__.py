"""One pass: the batch by sequences, where its tokens are placed, what is read, masks, attention over it.

Others use ``split_batch`` and ``SequenceTokens``, ``place`` (which cells a batch gets), ``ForwardPass``,
``plan_read``, ``attend``, ``GraphRows`` (fixed shapes), and
``RaggedBatch`` and ``DenseBatch`` for runtimes that want several sequences as one tensor. Masks are made in
``masks``.
"""
