"""Where bytes lie and who owns them: the cell table, K and V buffers, quantized blocks, slots of states."""
