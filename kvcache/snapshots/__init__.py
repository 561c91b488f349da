"""What a sequence held: taken, scheduled, cut, joined, restored, serialized.

Others use the snapshot classes of ``snapshot``, the managers ``AttentionSnapshots`` and ``StateSnapshots``,
``SnapshotSchedule``, ``CellReservation`` and ``IncomingSnapshot`` (cells held for content still to come),
``serialize`` and ``deserialize``, ``cut_serialized``, ``check_serialized`` and ``check_layers``.
"""
