"""Describe the architectures, one file each, their tables of facts, and the registry that finds the right one."""
