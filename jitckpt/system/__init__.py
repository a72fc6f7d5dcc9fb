"""What the operating system lends: processes, descriptors, signals, threads for slow disks."""
