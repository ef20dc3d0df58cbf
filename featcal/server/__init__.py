"""Run long work in separate processes: a queue on this machine outlives pages, browsers and servers.

`order` describes a job, `Queue.submit` adds it, and `ensure_manager` makes sure that a process works on it.
"""
