"""An engine behind OpenAI's API, over HTTP: what ``kvcache serve`` runs. It needs the extra ``[server]``.

worker.py has the engine in its own thread and its events in asyncio, app.py the routes; asked.py, answers.py
and errors.py are OpenAI's JSON, in and out; template.py makes prompts of messages, index.py the
page at /, metrics.py what /metrics tells, tracing.py its spans; running.py listens, and ends in order.
"""

from kvcache_engine.serve.app import make_app
from kvcache_engine.serve.options import ServeOptions
from kvcache_engine.serve.running import serve
from kvcache_engine.serve.template import template_of
from kvcache_engine.serve.worker import Worker

__all__ = ["ServeOptions", "Worker", "make_app", "serve", "template_of"]
