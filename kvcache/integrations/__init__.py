"""These caches inside other runtimes. Each module imports the runtime that it supports."""
