"""Serve agents: ten tools on top of the command line's functions, for clients of the Model Context Protocol (MCP).

`tools` has the tools, `access` the permissions, `work` starts jobs and follows them, `answers` truncates and quotes;
only `serve` uses the protocol's package.
"""
