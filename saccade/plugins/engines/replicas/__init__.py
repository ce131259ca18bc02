"""Engines in processes of their own: `replica` is one of them, `replica_pool` several behind one
queue, `replica_process` what runs there.
"""
