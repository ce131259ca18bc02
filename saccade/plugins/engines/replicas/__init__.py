"""Engines in processes of their own. `server` holds any engine behind HTTP on loopback, `client` is
that server as an engine, `replicas` are several of them behind one queue, `wire` and `weights` say
how requests, completions and weights travel.
"""
