"""Where bytes lie and who owns them.

Others use ``CellTable`` (which sequence and position lies in which cell: metadata alone), ``CellStorage``
and ``LayerBuffers`` (K and V of the layers), ``Buffer`` and ``QuantizedBuffer``, ``States`` and
``StateTable`` (recurrent states in slots), ``HostArrays`` (uploads), and ``relocation`` (moving what is
stored: shifts, defragmentation).
"""
