"""Our caches inside other runtimes. Each module here imports the runtime that it is for."""
