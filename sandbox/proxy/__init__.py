"""The tool proxy: one host-side process per node that stands between a sandbox and real APIs.

A sandbox gets a unix socket and a token. It never sees an upstream's address or a secret, and it
reaches nothing but the tools of its own episode.

    sandbox --token--> doors --> pipeline: schema, access rule, mode, quotas, money,
                                 idempotency key --> upstream (secrets go in last)
                                 <-- scrubbed reply, cassette, shape, audit line

Modes of a tool: ``simulate`` (the author's Python), ``replay`` (cassette only; a miss is the error
CASSETTE_MISS), ``record``, ``live_read`` (only tools that read), ``live``. The default is replay;
the kill switch turns everything that reaches an upstream into replay or simulate.

Rooms: ``config`` (what operator and author declare), ``proxy`` (ToolProxy), ``pipeline`` (one
call), ``world`` and ``episode`` (state), ``upstreams`` (python, openapi, mcp), ``secrets``,
``scrub`` and ``signing``, ``network`` (addresses), ``cassette``, ``quota`` and ``limits``,
``audit``, ``shaping``, ``retry``; ``server``, ``doors``, ``client`` and ``__main__`` are shells.
Specification: facts/sandboxes.md 2.
"""
