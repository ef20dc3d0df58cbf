"""Answer agents: ten tools over what the command line does, for clients of the Model Context Protocol (MCP).

`tools` has the tools, `access` what the person who started the server allows, `work` starts jobs and follows them,
`answers` cuts and quotes; `serve` alone knows the protocol's package.
"""
