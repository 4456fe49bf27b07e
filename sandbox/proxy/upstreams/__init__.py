"""Upstreams: where a call goes when it leaves the proxy. One file a kind, one protocol (base)."""
