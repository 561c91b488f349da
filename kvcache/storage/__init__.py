"""Storage: the placement and ownership of bytes. Used by other packages: ``CellTable`` (which cell holds
which position of which sequence; metadata only), ``CellStorage`` and ``LayerBuffers`` (K and V of the
layers), ``Buffer`` and ``QuantizedBuffer``, ``States`` and ``StateTable`` (recurrent states in slots),
``HostArrays`` (uploads), and ``relocation`` (moving stored data: shifts and defragmentation).
"""
