"""Engines in separate processes: `replica` controls one of them, `replica_pool` several behind one
queue; `replica_process` is what runs there.
"""
