"""What the machine gives: child processes, disk, devices, and how records are written."""
