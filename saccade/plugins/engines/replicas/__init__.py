"""Engines in separate processes: `replica` is one of them, `replica_pool` several behind one
queue, `replica_process` what runs there.
"""
