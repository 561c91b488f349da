"""--draft of kvcache generate and serve: the same text, what was accepted, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvcache_engine.command.drafting import Drafting, speculation_rows
from kvcache_engine.engine import EngineOptions
from kvcache_engine.loading import bundled_model
from kvcache_engine.options import SpeculativeOptions
from kvcache_engine.verification import Speculation

from .cli_rig import run

PROMPT = "And God said unto Noah,"
WORDS = ("generate", "--prompt", PROMPT, "--max-tokens", "24", "--json")


def generated(*words: str) -> dict[str, Any]:
    result = run(*WORDS, *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.output)


def test_drafts_change_no_text_and_are_counted() -> None:
    plain = generated()
    assert "speculation" not in plain["statistics"]
    for draft in ("lookup", str(bundled_model())):
        found = generated("--draft", draft, "--draft-tokens", "3")
        assert found["outputs"][0]["text"] == plain["outputs"][0]["text"]
        counts = found["statistics"]["speculation"]
        assert counts["drafted"] >= counts["accepted"]
        assert counts["passes"] + counts["accepted"] == 23
    assert (counts["acceptance"], counts["tokens_per_pass"]) == (1.0, pytest.approx(23 / 6))


def test_a_draft_of_the_same_model_is_accepted_by_rejection_and_less_by_draws() -> None:
    drawn = ("--draft", str(bundled_model()), "--temperature", "1", "--seed", "3")
    rejection, exact = (generated(*drawn, "--acceptance", way) for way in ("rejection", "exact"))
    assert rejection["statistics"]["speculation"]["acceptance"] == 1.0
    assert exact["statistics"]["speculation"]["acceptance"] < 1.0
    assert exact["outputs"][0]["text"] == generated(*drawn[2:])["outputs"][0]["text"]


def test_the_summary_says_what_was_accepted() -> None:
    assert speculation_rows(Speculation()) == []
    rows = dict(speculation_rows(Speculation(passes=10, drafted=40, accepted=30)))
    assert rows == {"drafts accepted": "30 of 40 (75%)", "tokens per pass": "4.00"}
    result = run(*WORDS[:-1], "--draft", "lookup")
    assert "drafts accepted" in result.output


def test_without_a_draft_the_engine_is_as_before() -> None:
    options = EngineOptions(capacity=8)
    assert Drafting().options(options) is options
    made = Drafting("lookup", 7).options(options)
    assert isinstance(made, SpeculativeOptions)
    assert (made.tokens, made.capacity, made.acceptance) == (7, 8, "rejection")
