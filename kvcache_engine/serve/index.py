"""The page at /: a description of the server, with an example request."""

from __future__ import annotations

import html
import json

__all__ = ["index_page"]

_STYLE = (
    ":root{color-scheme:light dark}body{font:15px/1.5 system-ui,sans-serif;max-width:44rem;margin:2rem auto;"
    "padding:0 1rem}td{padding:2px 16px 2px 0;vertical-align:top}pre{overflow-x:auto}"
)
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{name}</title><style>{style}</style></head>
<body><h1>{name}</h1>
<p>A language model behind OpenAI's API, served by ml-kvcache {version}; requests are batched, and prompts
that begin alike share what was computed. One request holds {limit} tokens at most, prompt and answer
together.</p>
<table>
{rows}
</table>
<pre>curl -N {url}v1/completions -H 'content-type: application/json' \\
  -d '{body}'</pre>
</body></html>
"""


def index_page(name: str, version: str, limit: int, url: str, paths: dict[str, str]) -> str:
    """``paths`` maps each path to its description; ``url`` is that of the page, with a trailing slash."""
    rows = "\n".join(
        f"<tr><td><code>{html.escape(path)}</code></td><td>{html.escape(what)}</td></tr>"
        for path, what in paths.items()
    )
    body = json.dumps({"model": name, "prompt": "And God said", "max_tokens": 48, "stream": True})
    body = body.replace("'", "\\u0027")  # inside the shell's quotes
    texts = {"name": name, "version": version, "url": url, "body": body}
    escaped = {key: html.escape(text, quote=False) for key, text in texts.items()}
    return _PAGE.format(style=_STYLE, limit=limit, rows=rows, **escaped)
