"""The example of a conversation that goes from runtime to runtime: the same tokens, from what there is."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("mlx_lm")

from examples.many_runtimes import PAGE, VOCABULARY, turn, write_model


def test_each_runtime_goes_on_from_what_the_others_stored(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2}  # fmt: skip
    folder, store = write_model(tmp_path / "model", **sizes), f"file://{tmp_path / 'store'}?durable=no"
    tokens = [(31 * i * i + 17 * i) % VOCABULARY for i in range(2 * PAGE + 40)]
    for i, runtime in enumerate(("transformers", "mlx-lm", "engine", "transformers")):
        expected, none, _ = turn(runtime, folder, "", tokens, 4)
        answer, restored, _ = turn(runtime, folder, store, tokens, 4)
        assert answer == expected
        assert none == 0
        assert restored >= 2 * PAGE if i else restored == 0
        tokens += answer
