"""JSON on standard output, the same way for every command."""

from __future__ import annotations

import codecs
import json
import sys
from dataclasses import asdict
from typing import Any

from kvcache_engine.requests import Finished, Statistics

__all__ = ["json_line", "output_record", "print_json", "statistics_record"]


def print_json(value: Any) -> None:
    """Write a value as one line, at once: whoever reads line by line has it as soon as it is there."""
    sys.stdout.write(json_line(value) + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """Without line breaks; letters are escaped only where standard output's encoding may lack some."""
    encoding = codecs.lookup(sys.stdout.encoding or "ascii").name
    return json.dumps(value, ensure_ascii=not encoding.startswith("utf"))


def output_record(prompt: str, answer: Finished) -> dict[str, Any]:
    """What a prompt was continued by."""
    record = {"prompt": prompt, **asdict(answer), "computed": answer.computed}
    del record["logprobs"]
    return record


def statistics_record(totals: Statistics, cache_bytes: int) -> dict[str, Any]:
    return {
        **asdict(totals),
        "prefill_tokens_per_second": totals.prefill_tokens_per_second,
        "decode_tokens_per_second": totals.decode_tokens_per_second,
        "cache_bytes": cache_bytes,
    }
