"""The steps of tools/gpu_check. Nothing here needs what they build."""
