"""An engine behind OpenAI's HTTP API, as run by ``kvcache serve``. It needs the extra ``[server]``.

worker.py runs the engine in a thread and passes its events to asyncio, app.py has the routes; asked.py,
answers.py and errors.py are OpenAI's JSON, in and out; template.py turns messages into prompts, index.py is
the page at /, metrics.py is /metrics, tracing.py has spans; running.py listens, and shuts down in order.
"""

from kvcache_engine.serve.app import make_app
from kvcache_engine.serve.options import ServeOptions
from kvcache_engine.serve.running import serve
from kvcache_engine.serve.template import template_of
from kvcache_engine.serve.worker import Worker

__all__ = ["ServeOptions", "Worker", "make_app", "serve", "template_of"]
