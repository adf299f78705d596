"""Entries for other libraries' registries; nothing of those libraries is imported until it is asked for."""
