"""The steps of tools/gpu_check; nothing here needs the binaries they build."""
