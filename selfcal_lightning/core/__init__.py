"""What every room uses: files, errors, progress, signals, processes and plug-ins."""
