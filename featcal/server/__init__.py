"""Run work that takes long in processes of its own: a queue on this machine outlives pages, browsers and servers.

`order` says what is wanted, `Queue.submit` puts it in line, `ensure_manager` sees to it that somebody works on it.
"""
