"""One pass: the batch by sequences, what is read, masks, and attention over it."""
