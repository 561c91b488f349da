"""JSON on standard output, in one form for all commands."""

from __future__ import annotations

import codecs
import json
import sys
from dataclasses import asdict
from typing import Any

from kvcache_engine.requests import Finished, Statistics

__all__ = ["json_line", "output_record", "print_json", "statistics_record"]


def print_json(value: Any) -> None:
    """Write a value as one line and flush it, for programs that read line by line."""
    sys.stdout.write(json_line(value) + "\n")
    sys.stdout.flush()


def json_line(value: Any) -> str:
    """A value without line breaks; letters are escaped only if standard output's encoding may lack some."""
    encoding = codecs.lookup(sys.stdout.encoding or "ascii").name
    return json.dumps(value, ensure_ascii=not encoding.startswith("utf"))


def output_record(prompt: str, answer: Finished) -> dict[str, Any]:
    """The record of an answer."""
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
