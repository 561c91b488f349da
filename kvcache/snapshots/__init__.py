"""Snapshots of sequences: taken, scheduled, split, joined, restored and serialized.

Used by other packages: the snapshot classes of ``snapshot``, the managers ``AttentionSnapshots`` and
``StateSnapshots``, ``SnapshotSchedule``, ``CellReservation`` and ``IncomingSnapshot`` (cells reserved for
content that is still to arrive), ``serialize`` and ``deserialize``, ``cut_serialized``, ``check_serialized``,
``layers_of_cache``, ``check_layers``, ``thin_snapshots`` and ``bytes_inside``.
"""
