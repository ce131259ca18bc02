"""System services: child processes, disk, devices, and the codec of records."""
